"""Bytes that one block of a training step moves, as compiled: `python -m benchmarks.block_bytes` (or `make plans`).

Compiles the 350M preset's sharded training step, with fewer blocks, for chips that are not there, and counts the loops
over blocks, forward and backward: what benchmarks/results/block_bytes.json lacks is compiled, then the table of
pallas_kernels/README.md is written. cuDNN attention, which a GPU run takes, cannot be compiled without a GPU. In its
place stands a kernel that has the same operands and no other use, so that no scores are in the count.
"""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from benchmarks import plan_tables as tables
from benchmarks.compiled import ROOT, main
from nagjax.layers.platform import tracing_for
from nagjax.options import read_options
from nagjax.plan.account import loops
from nagjax.plan.order import choose, filled
from nagjax.plan.topology import parse
from nagjax.train.abstract_step import training_step
from pallas_kernels.hlo import parse as parse_program
from pallas_kernels.placement import current_placement, on_shards

PRESET, VOCAB, DEPTH = "350M", 32768, 6
SCHEMES, REMATS = ("nag", "plain"), ("block", "none")
WAYS = {  # what is patched to get the plain formulas
    "separate": {f"nagjax.layers.{name}.on_gpu": lambda: False for name in ("linear", "attention")},
    "joined": {},
}
CHIPS = {"h200x8": tuple(WAYS), "v5e:2x2": ("separate",), "v5e:4x4": ("separate",)}  # with the ways measured on each
CASES = [
    (chip, remat, way, scheme) for chip, ways in CHIPS.items() for remat in REMATS for way in ways for scheme in SCHEMES
]


def attention(q, k, v, *options):
    """One kernel for the forward and one for the backward pass, with the same operands as cuDNN's; they compute
    nothing."""

    def forward(q, k, v):
        rows = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
        out, rows = _kernel((q, rows), q, k, v)
        return out, (q, k, v, out, rows)

    def backward(kept, d):
        return _kernel(kept[:3], *kept, d)

    attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    return attend(q, k, v)


def _kernel(like, *operands):
    from jax.experimental.pallas import triton

    def body(first, *rest):
        for ref in rest[-len(like) :]:
            ref[(0,) * len(ref.shape)] = first[0, 0, 0, 0].astype(ref.dtype)

    placement = current_placement()
    parts = placement.mesh.size if placement else 1

    def run(*operands):
        results = [jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype) for x in like]
        call = pl.pallas_call(body, out_shape=results, compiler_params=triton.CompilerParams(), name="attention")
        return tuple(call(*operands))

    return on_shards(run, placement, (1,) * len(operands), (1,) * len(like))(*operands)


def measured(topology_name: str, remat: str, way: str, scheme: str) -> dict[str, float]:
    """`moved`: the bytes of main memory that each device reads and writes for one block, forward and backward
    together."""
    topology = parse(topology_name)
    config = read_options({"preset": PRESET, "remat": remat, "scheme": scheme, "depth": DEPTH}).config()
    config, _ = choose(filled(config, topology, VOCAB, batch_given=False, mesh_given=False), topology)
    patches = WAYS[way] | ({} if topology.chip.platform == "tpu" else {"nagjax.layers.attention.attend": attention})
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch(name, value))
        step, args, mesh = training_step(config, topology.devices())
        stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(tracing_for(topology.chip.platform))
        text = step.trace(*args).lower(lowering_platforms=(topology.chip.platform,)).compile().as_text()
    found = loops(parse_program(text), topology.size)
    return {"moved": sum(cost.moved * times for cost, times in found if _of_blocks(cost)) / DEPTH}


def _of_blocks(cost) -> bool:
    return any(name.startswith(("nag_update", "add_rms_norm")) for name in cost.kernels)


def texts(results: list[dict]) -> dict[str, str]:
    head = ("chip", "`--remat`", "matmuls of one input", "NAG, MB", "plain, MB", "NAG / plain")
    found = {tuple(one["case"]): one["moved"] / 1e6 for one in results}
    rows = []
    for chip, remat, way, scheme in CASES:
        nag, plain = (found.get((chip, remat, way, other)) for other in SCHEMES)
        if scheme == SCHEMES[0] and nag and plain:
            rows.append((f"`{chip}`", remat, way, f"{nag:,.0f}", f"{plain:,.0f}", f"{nag / plain:.3f}x"))
    return {"block bytes": tables.table(head, rows)}


PAGES = {ROOT / "pallas_kernels" / "README.md": texts}


if __name__ == "__main__":
    main("block_bytes", CASES, measured, PAGES)
