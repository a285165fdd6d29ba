"""The example of secure sums: the same model as with plain ones."""

from __future__ import annotations

from pathlib import Path
import re
import runpy

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "secure_sum.py"


def test_secure_sums_give_the_same_model(capsys, monkeypatch):
    program = runpy.run_path(str(EXAMPLE))
    monkeypatch.setitem(program["main"].__globals__, "ROUNDS", 1)
    program["main"]()
    printed = capsys.readouterr().out
    plain, secure = re.findall(r"sums, round 1: loss of the largest variants (\S+)", printed)
    assert plain == secure
    assert "clients with clipped values in the last round: 0\n" in printed
    [difference] = re.findall(r"between plain and secure sums: (\S+)", printed)
    assert float(difference) < 1e-6
