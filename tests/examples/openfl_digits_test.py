"""The OpenFL example: a real aggregator and collaborators of four budgets."""

from __future__ import annotations

from pathlib import Path
import re
import subprocess
import sys

import pytest

pytest.importorskip("openfl", reason="OpenFL has an environment of its own: make test-modern")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "openfl_digits.py"


@pytest.mark.slow
def test_collaborators_of_all_budgets_train(tmp_path):
    run = subprocess.run([sys.executable, EXAMPLE, f"--output_dir={tmp_path}"],
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    points = re.findall(r"accuracy at (\S+) MACs: (\S+)", run.stdout)
    assert len(points) == 5
    # More than one round of training; the model on disk is that of the last but one.
    assert max(float(accuracy) for _, accuracy in points) > 0.6
    log = (tmp_path / "federation" / "aggregator.log").read_text()
    assert "refused" not in log
    assert len(re.findall(r"is sending task results for train", log)) == 3 * 4
