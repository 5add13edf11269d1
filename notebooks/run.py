"""Execute the notebooks top to bottom: `python notebooks/run.py [--write] [NAME...]`.

An error ends it with exit code 1. The committed files stay as they are unless `--write` renews their outputs.
"""

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).parent
SECONDS = 600  # a cell; on two idle cores a whole notebook takes under one minute


def run(path: Path, write: bool) -> float:
    """Seconds it took. Runs in an empty folder, so that no earlier run is found."""
    notebook, began = nbformat.read(path, as_version=4), time.monotonic()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory() as folder:
        options = {"timeout": SECONDS, "kernel_name": "python3", "coalesce_streams": True}
        options["extra_arguments"] = ["--IPKernelApp.log_level=40"]
        NotebookClient(notebook, resources={"metadata": {"path": folder}}, **options).execute()
    took = time.monotonic() - began
    if write:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
        notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
        nbformat.write(notebook, path)
    return took


def main(args: list[str]) -> int:
    write = "--write" in args
    names = [arg for arg in args if arg != "--write"]
    paths = [HERE / Path(name).name for name in names] or sorted(HERE.glob("*.ipynb"))
    for path in paths:
        try:
            print(f"{path.name}: {run(path, write):.0f} s", flush=True)
        except CellExecutionError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
