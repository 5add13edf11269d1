"""The GPU assembler's figures of a kernel. XLA and Mosaic GPU run the assembler and print them; jax_triton stops at
PTX, which only a GPU's driver would check, so such kernels are assembled here."""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock


def assembler() -> str | None:
    """The path of `ptxas`, from the CUDA wheels or else from PATH; None if there is none."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(p) for p in spec.submodule_search_locations] if spec else []
    found = sorted(str(p) for place in places for p in place.glob("cu1*/bin/ptxas"))
    return found[-1] if found else shutil.which("ptxas")


def figures(said: str, kernel: str = "") -> dict:
    """The largest numbers of registers and of spilled bytes per thread that `ptxas -v` printed for the entries whose
    names begin with `kernel`; empty if there are none."""
    pattern = r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    found = [(int(r), int(s)) for name, s, r in re.findall(pattern, said, re.DOTALL) if name.startswith(kernel)]
    return dict(zip(("registers", "spilled"), map(max, zip(*found, strict=True)), strict=True)) if found else {}


def assemble(ptx: str) -> dict:
    """The `figures` of a program, and under "problems" why `ptxas` refuses it."""
    target = re.search(r"\.target\s+(\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [assembler(), "-v", f"--gpu-name={target}", str(source), "-o", f"{folder}/kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    return figures(said) | {"problems": [f"ptxas for {target}: {said[-1000:]}"] if done.returncode else []}


@contextlib.contextmanager
def listening() -> Iterator[Callable[[], str]]:
    """Yields a function that returns what compilers have written since, if standard error is a file. Inside this
    context their standard output also goes there."""
    start, output = os.fstat(2).st_size, os.dup(1)
    os.dup2(2, 1)

    def said() -> str:
        with contextlib.suppress(OSError):
            return os.pread(2, os.fstat(2).st_size - start, start).decode(errors="replace")
        return ""

    try:
        yield said
    finally:
        os.dup2(output, 1)
        os.close(output)


@contextlib.contextmanager
def assembling() -> Iterator[dict]:
    """Assembles every raw Triton kernel that is lowered inside. The yielded dict has the figures afterwards."""
    found: dict = {"problems": []}
    if importlib.util.find_spec("jax_triton") is None:
        yield found
        return
    from jax_triton import triton_lib

    if not hasattr(triton_lib, "compile_ttir_inplace"):
        found["problems"].append("jax_triton has no compile_ttir_inplace: raw Triton kernels are not assembled")
        yield found
        return
    programs = []

    original = triton_lib.compile_ttir_inplace

    def compile_and_keep(*args, **kwargs):
        programs.append(original(*args, **kwargs))
        return programs[-1]

    with mock.patch.object(triton_lib, "compile_ttir_inplace", compile_and_keep):
        yield found
    for result in [assemble(program.binary) for program in programs]:
        found["problems"] += result.pop("problems")
        found |= {name: max(value, found.get(name, 0)) for name, value in result.items()}
