"""The example of plain NumPy rounds runs, counts who failed, and learns at every level."""

from __future__ import annotations

from pathlib import Path
import re
import runpy

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "numpy_rounds.py"


def test_it_learns(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("8 clients in the mean, 1 refused, 1 missing") == 4
    levels = re.findall(r": (\d+) hidden units, (\d+) parameters, test accuracy (\S+)", printed)
    assert [(int(width), int(size)) for width, size, _ in levels] == [
        (width, width * 75 + 10) for width in (8, 24, 96)]
    assert min(float(accuracy) for *_, accuracy in levels) > 0.75
