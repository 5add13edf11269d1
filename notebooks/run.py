"""Execute the notebooks top to bottom, two at a time: `python notebooks/run.py [--write] [NAME...]`.

An error ends it with exit code 1. The committed files stay as they are unless `--write` renews their outputs.
"""

import base64
import io
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from PIL import Image

HERE = Path(__file__).parent
SECONDS = 600  # a cell; on two idle cores a whole notebook takes about one minute
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


def with_palette(png: str) -> str:
    """A base64 PNG of at most 255 colours: a third of the bytes, and a plot looks the same. The colours cover the range
    of those that are there (a median cut would take the ends of a colour map for one colour)."""
    small = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        fewer = image.convert("RGB").quantize(255, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    fewer.save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def run(path: Path, write: bool) -> tuple[float, str]:
    """Seconds it took, and the error if there was one. Runs in an empty folder, so that no earlier run is found."""
    notebook, began = nbformat.read(path, as_version=4), time.monotonic()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory() as folder:
        options = {"timeout": SECONDS, "kernel_name": "python3", "coalesce_streams": True}
        options["extra_arguments"] = ["--IPKernelApp.log_level=40"]
        try:
            NotebookClient(notebook, resources={"metadata": {"path": folder}}, **options).execute()
        except (CellExecutionError, CellTimeoutError) as error:
            return time.monotonic() - began, str(error)
    if write:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = with_palette(output.data["image/png"])
        notebook.metadata = {"kernelspec": KERNELSPEC}
        nbformat.write(notebook, path)
    return time.monotonic() - began, ""


def main(args: list[str]) -> int:
    write = "--write" in args
    names = [arg for arg in args if arg != "--write"]
    paths = [HERE / Path(name).name for name in names] or sorted(HERE.glob("*.ipynb"))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two notebooks may share a GPU
    failed = 0
    with ProcessPoolExecutor(max_workers=2) as pool:
        for path, (took, error) in zip(paths, pool.map(partial(run, write=write), paths), strict=True):
            print(f"{path.name}: {took:.0f} s {error}", flush=True)
            failed += bool(error)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
