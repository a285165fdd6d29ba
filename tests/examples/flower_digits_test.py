"""The Flower example: SuperNodes of four budgets, of which one dies, and one without a level."""

from __future__ import annotations

import ast
from pathlib import Path
import re
import subprocess
import sys

import psutil
import pytest

pytest.importorskip("flwr", reason="Flower has an environment of its own: make test-modern")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "flower_digits.py"


def kill_supernode(launcher: psutil.Process, partition: int) -> None:
    """Ends a SuperNode, and what it runs, as a crash of its machine would."""
    [node] = [process for process in launcher.children()
              if f"partition-id={partition} " in " ".join(process.cmdline())]
    for process in [node, *node.children(recursive=True)]:
        process.kill()


@pytest.mark.slow
def test_nodes_of_all_budgets_train_and_a_dead_one_is_counted():
    command = [sys.executable, EXAMPLE, "--rounds=2", "--round_timeout=240",
               "0.7e6", "1.3e6", "3.5e6", "6e6", "1000"]
    lines, drawn = [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as run:
        for line in run.stdout:
            lines.append(line)
            drawn += "Sampled 5 nodes" in line
            if drawn == 2 and "Sampled" in line:
                kill_supernode(psutil.Process(run.pid), 1)
        children = psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
    text = "".join(lines)
    assert run.returncode == 0, text
    first, second = [ast.literal_eval(found) for found in
                     re.findall(r"Aggregated MetricRecord: (\{.*\})", text)]
    assert (first["clients-with-data"], first["clients-without-level"]) == (4, 1), text
    assert (second["clients-with-data"], second["clients-without-level"]) == (3, 1), text
    assert (second["clients-failed"], second["clients-missing"]) == (0, 1), text
    assert second["num-examples"] < first["num-examples"]
    [points] = [ast.literal_eval(found) for found in
                re.findall(r"MetricRecord: (\{'accuracy-at.*\})", text)]
    assert len(points) == 5 and max(points.values()) > 0.5
    psutil.wait_procs(children, timeout=10)
    assert not [process for process in children if process.is_running()]
