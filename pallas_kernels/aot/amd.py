"""Compiles Pallas-Triton kernels for an AMD GPU. No wheel has XLA's compiler for it, but Triton's takes the same
programs."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax._src.lib import triton as dialect
from jax._src.lib.mlir import ir
from jax.sharding import use_abstract_mesh

from pallas_kernels.aot.cases import Case, program
from pallas_kernels.aot.targets import Target, abstract_mesh
from pallas_kernels.launch import tracing_for

CALL = "xla.gpu.triton"
LANES = 64


def compile_for_amd(case: Case, target: Target) -> dict:
    """The largest numbers of registers and of spilled registers per thread over all kernels of a case, the number of
    its kernels, and under "problems" what is wrong."""
    with use_abstract_mesh(abstract_mesh(target)), tracing_for("rocm"):
        fn, args = program(case)
        lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("rocm",))
    found = [_kernel(text, warps, target.kind) for text, warps in _programs(lowered.compiler_ir())]
    if not found:
        return {"problems": [f"no {CALL} in the program"]}
    registers, spilled = (max(column) for column in zip(*found, strict=True))
    return {"registers": registers, "spilled": spilled, "custom_calls": {CALL: len(found)}, "problems": []}


def _programs(module: ir.Module) -> Iterator[tuple[str, int]]:
    """The text and the number of warps of every Triton program in a lowered module."""
    configs = []

    def visit(op):
        if CALL in str(op.attributes["call_target_name"] if "call_target_name" in op.attributes else ""):
            configs.append(ir.DictAttr(op.attributes["mhlo.backend_config"]))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for config in configs:
        with ir.Context() as context:
            dialect.dialect.register_dialect(context)
            program = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
            text = program.operation.get_asm(enable_debug_info=False, print_generic_op_form=True)
        yield text, ir.IntegerAttr(config["num_warps"]).value


def _kernel(text: str, warps: int, architecture: str) -> tuple[int, int]:
    """Registers and spilled registers per thread. Raises what Triton's compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttir"
        path.write_text(text)
        target, options = GPUTarget("hip", architecture, LANES), {"num_warps": warps, "num_stages": 1}
        assembly = triton.compile(str(path), target=target, options=options).asm["amdgcn"]
    return tuple(int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1]) for name in ("vgpr_count", "vgpr_spill_count"))
