"""The example of an existing FedAvg pipeline: the sliced mean helps the units that few train."""

from __future__ import annotations

from pathlib import Path
import re
import runpy

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fedavg_pipeline.py"


def test_units_that_few_clients_train_learn_faster(capsys, monkeypatch):
    program = runpy.run_path(str(EXAMPLE))
    monkeypatch.setitem(program["main"].__globals__, "ROUNDS", 3)
    program["main"]()
    plain, sliced = ([float(accuracy) for accuracy in re.findall(r"(\S+) with \d+ units", line)]
                     for line in capsys.readouterr().out.splitlines() if " mean: " in line)
    assert len(plain) == len(sliced) == 3
    assert sliced[1] > plain[1] + 0.1 and sliced[2] > plain[2] + 0.1
