"""Assembles raw Triton kernels: jax_triton stops at PTX, which otherwise only a GPU's driver would check."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock


def assembler() -> str | None:
    """The path of `ptxas`: from the CUDA wheels, else from PATH."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(p) for p in spec.submodule_search_locations] if spec else []
    found = sorted(str(p) for place in places for p in place.glob("cu1*/bin/ptxas"))
    return found[-1] if found else shutil.which("ptxas")


def assemble(ptx: str) -> dict:
    """The registers and spilled bytes of a thread, or under "problems" why `ptxas` refuses the program."""
    target = re.search(r"\.target\s+(\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [assembler(), "-v", f"--gpu-name={target}", str(source), "-o", f"{folder}/kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode:
        return {"problems": [f"ptxas for {target}: {said[-1000:]}"]}
    registers, spilled = (re.findall(p, said) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    return {"registers": max(map(int, registers)), "spilled": sum(map(int, spilled)), "problems": []}


@contextlib.contextmanager
def assembling() -> Iterator[dict]:
    """Assembles every raw Triton kernel that is lowered inside; the yielded dict has the figures afterwards."""
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
