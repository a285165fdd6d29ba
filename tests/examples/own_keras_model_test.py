"""The example with a user's Keras model trains all its widths."""

from __future__ import annotations

from pathlib import Path
import re
import runpy

import pytest

pytest.importorskip("tensorflow_federated")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_keras_model.py"


def test_every_level_learns(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    levels = re.findall(r"level (\d): (\d+) parameters, test accuracy (\S+)", printed)
    assert [(int(level), int(size)) for level, size, _ in levels] == [(0, 148), (1, 682), (2, 4258)]
    assert min(float(accuracy) for *_, accuracy in levels) > 0.9
