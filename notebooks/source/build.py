"""Run every chapter from its .py source and keep the outputs: `make notebooks`. Name chapters to build only those.

    python -m notebooks.source.build
    python -m notebooks.source.build notebooks/source/03_worked_example.py

The .py files (jupytext's percent format) are the sources; each .ipynb is its pair, cell ids kept.
"""

import os
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

SOURCES = Path(__file__).parent
FOLDER = SOURCES.parent
WIDGET = "application/vnd.jupyter.widget-view+json"
# How a kernel starts: in the folder of the notebooks, on one thread. (With more, small tensors are no faster, and when
# another program needs the cores, the threads wait for each other: chapter 2 then takes 40 times as long.)
KERNEL = {"cwd": str(FOLDER), "env": os.environ | {"OMP_NUM_THREADS": "1"}}
QUIET = ["--log-level=ERROR"]


def chapters() -> list[Path]:
    """The .py sources of the chapters, in reading order."""
    return sorted(SOURCES.glob("[0-9][0-9]*_*.py"))


def others() -> list[Path]:
    """The .py sources of the notebooks that are no chapters."""
    appendices = [SOURCES / f"appendix_{name}.py" for name in ("ring_in_jax", "ring_of_states")]
    return [*appendices, *(FOLDER / f"{name}/{name}.py" for name in ("puzzles", "your_ring"))]


def pair(source: Path) -> Path:
    """The notebook of a .py source: a chapter's lies in the folder of the notebooks, another beside its source."""
    return (FOLDER / source.name if source.parent == SOURCES else source).with_suffix(".ipynb")


def execute(notebook: NotebookNode, **client: Any) -> None:
    """Run all cells in place, in the folder of the notebooks; raises CellExecutionError where one fails.

    `client` goes to NotebookClient; with km=..., a running kernel is used and not a new one.
    """
    options = {"timeout": 120, "kernel_name": "python3", "coalesce_streams": True}  # one output for all that is printed
    NotebookClient(notebook, **options, **client, extra_arguments=QUIET).execute(**KERNEL)
    notebook.metadata.pop("widgets", None)  # sliders need a kernel anyway
    notebook.metadata.pop("language_info", None)  # names the Python that ran it: not part of the chapter
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":  # a slider without its kernel is a dead line of text: the picture beside it stays
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]


def build(source: Path) -> None:
    """Write the notebook of a .py source: its cells, run now, with the ids that they had before."""
    path = pair(source)
    notebook = jupytext.read(source)
    if path.exists():
        notebook = jupytext.combine.combine_inputs_with_outputs(notebook, nbformat.read(path, as_version=4))
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    execute(notebook)
    nbformat.write(notebook, path)


def main() -> int:
    for source in [Path(name).resolve() for name in sys.argv[1:]] or chapters() + others():
        print(f"running {source.stem}", flush=True)
        build(source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
