"""The notebook runs from its first cell to its last in a kernel of its own; what it printed is not committed."""

from __future__ import annotations

from pathlib import Path

import brief
import pytest

pytestmark = pytest.mark.slow

nbclient = pytest.importorskip("nbclient", reason="needs the development packages")
nbformat = pytest.importorskip("nbformat", reason="needs the development packages")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_plan.ipynb"


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_it_holds_no_output_that_could_be_old() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of the kernel's client
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(brief.CODE))
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = "\n".join(printed(cell) for cell in notebook.cells if cell.cell_type == "code")
    assert "left alone: " in text
    assert "60 windows, 7188 samples" in text
    assert text.rstrip().endswith("closed")  # how the run ended
