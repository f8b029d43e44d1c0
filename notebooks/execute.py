"""``python notebooks/execute.py``: run the notebooks and keep their outputs, without what belongs to one machine.

The first notebook reads ``runs/default``, so ``make fit`` comes before.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook and return it with the outputs of its cells; an error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}).execute()
    return notebook


def portable(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove warnings of libraries, which name paths, and the version of Python."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}
    return notebook


if __name__ == "__main__":
    for name in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        nbformat.write(portable(execute(name)), name)
