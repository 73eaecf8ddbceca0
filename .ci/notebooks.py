"""Executes notebooks from nothing, outputs and all: `python .ci/notebooks.py NOTEBOOK ...`."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def execute(path: Path) -> None:
    """Runs all cells in a new kernel, in the notebook's folder; raises where one fails."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.clear()
    context = {"metadata": {"path": str(path.parent)}}
    # Without times, an execution that shows the same leaves the file as it was.
    NotebookClient(notebook, timeout=300, record_timing=False, resources=context).execute()
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec}
    path.write_text(nbformat.writes(notebook) + "\n")
    print(f"{path.name}: {len(notebook.cells)} cells, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        execute(Path(name))
