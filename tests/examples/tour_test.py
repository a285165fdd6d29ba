"""The notebook runs from top to bottom, in a kernel of its own."""

from __future__ import annotations

from pathlib import Path
import re

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("tensorflow_federated")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert codes and not any(cell.outputs or cell.execution_count for cell in codes)


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells
                      for output in cell.get("outputs", ()) if output.get("name") == "stdout")
    accuracies = [float(value) for value in re.findall(r"MACs: test accuracy (\S+)", printed)]
    assert len(accuracies) == 5 and min(accuracies) > 0.6
    [of_file] = re.findall(r"test accuracy of the file: (\S+)", printed)
    assert abs(float(of_file) - accuracies[2]) < 0.01
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells
               for output in cell.get("outputs", ()))
