"""Run a `RowKernel` on a TPU: a grid over blocks of whole rows, double-buffered by Mosaic.

A block holds full rows, so row statistics need one visit and any width is allowed: Mosaic masks the lanes
beyond it. Sums over rows collect in a block of 8 partial rows that stays on chip (one per sublane: a block
adds vectors and never crosses sublanes), in the order of the blocks. The grid has two such halves where the
number of blocks is even, for chips with two cores; their partial rows are added up outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import RowKernel
from pallas_kernels.dispatch import interpreter

PLATFORMS = ("tpu",)

SUBLANES = 8
LANES = 128
# Mosaic may use 16 MiB of VMEM on the smallest target (v5e) unless a program raises the limit. The rest is
# for what the compiler spills.
VMEM_BYTES = 12 * 2**20
MAX_BLOCK_ROWS = 512


def row_bytes(kernel: RowKernel, width: int, dtype: object) -> int:
    """VMEM for one row: two buffers per tensor, and one float32 copy of each tensor and summand."""
    lanes = -(-width // LANES) * LANES
    return lanes * (2 * kernel.tensors * jnp.dtype(dtype).itemsize + 4 * (kernel.tensors + kernel.sums))


def smallest_block(dtype: object) -> int:
    """Rows in one hardware tile of this dtype: 8 of float32, 16 of bfloat16."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def block_rows(kernel: RowKernel, n: int, width: int, dtype: object) -> int:
    """Rows per block: a power of two within the VMEM budget, no more than needed for `n` rows."""
    rows = MAX_BLOCK_ROWS
    while rows > smallest_block(dtype) and rows * row_bytes(kernel, width, dtype) > VMEM_BYTES:
        rows //= 2
    while rows > smallest_block(dtype) and rows // 2 >= n:
        rows //= 2
    return rows


def refusal(kernel: RowKernel, width: int, dtype: object) -> str | None:
    """Why rows of this width and dtype cannot be taken."""
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"{jnp.dtype(dtype).name} rows; accepted: float32, bfloat16"
    need = smallest_block(dtype) * row_bytes(kernel, width, dtype)
    if need > VMEM_BYTES:
        return f"D = {width}: one block takes {need >> 20} MiB of VMEM; accepted: {VMEM_BYTES >> 20} MiB"
    return None


def grid(kernel: RowKernel, n: int, width: int, dtype: object) -> tuple[int, int]:
    """Independent parts of the grid, and blocks in each."""
    blocks = pl.cdiv(n, block_rows(kernel, n, width, dtype))
    parts = math.gcd(blocks, 2)
    return parts, blocks // parts


def expected_bytes_moved(kernel: RowKernel, n: int, width: int, dtype: object) -> int:
    """Bytes of one pass: every tensor once, and 8 float32 partial rows per part of the grid and sum."""
    return kernel.bytes_moved(n, width, dtype, SUBLANES * grid(kernel, n, width, dtype)[0])


def rows_call(
    kernel: RowKernel, rows: Sequence[jax.Array], vectors: Sequence[jax.Array], **constants: float
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """`kernel` over all rows: its `[N, D]` outputs in the dtype of the rows, and its float32 `[D]` sums."""
    (n, width), dtype = rows[0].shape, rows[0].dtype
    block = block_rows(kernel, n, width, dtype)
    parts, blocks = grid(kernel, n, width, dtype)

    def program(*refs):
        row_refs, refs = refs[: len(rows)], refs[len(rows) :]
        vector_refs, refs = refs[: len(vectors)], refs[len(vectors) :]
        out_refs, sum_refs = refs[: kernel.outputs], refs[kernel.outputs :]
        outputs, summands = kernel.body(
            [r[...].astype(jnp.float32) for r in row_refs],
            [v[...] for v in vector_refs],
            width=width,
            dtype=dtype,
            **constants,
        )
        for ref, value in zip(out_refs, outputs, strict=True):
            ref[...] = value.astype(dtype)
        if not sum_refs:
            return

        @pl.when(pl.program_id(1) == 0)
        def _():
            for ref in sum_refs:
                ref[...] = jnp.zeros_like(ref)

        first = (pl.program_id(0) * blocks + pl.program_id(1)) * block
        row = first + jax.lax.broadcasted_iota(jnp.int32, (block, width), 0)
        for ref, value in zip(sum_refs, summands, strict=True):
            # The last block may reach beyond the rows, where memory holds anything, NaN included.
            kept = jnp.where(row < n, value, 0.0)
            ref[0] += jnp.sum(kept.reshape(block // SUBLANES, SUBLANES, width), axis=0)

    row_spec = pl.BlockSpec((block, width), lambda part, i: (part * blocks + i, 0))
    vector_spec = pl.BlockSpec((1, width), lambda part, i: (0, 0))
    sum_spec = pl.BlockSpec((1, SUBLANES, width), lambda part, i: (part, 0, 0))
    results = pl.pallas_call(
        program,
        grid=(parts, blocks),
        in_specs=[row_spec] * len(rows) + [vector_spec] * len(vectors),
        out_specs=[row_spec] * kernel.outputs + [sum_spec] * kernel.sums,
        out_shape=[jax.ShapeDtypeStruct((n, width), dtype)] * kernel.outputs
        + [jax.ShapeDtypeStruct((parts, SUBLANES, width), jnp.float32)] * kernel.sums,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=8 * kernel.tensors * n * width,
            transcendentals=kernel.transcendentals * n * width,
            bytes_accessed=expected_bytes_moved(kernel, n, width, dtype),
        ),
        interpret=interpreter(),
        name=kernel.name,
    )(*rows, *(v.astype(jnp.float32)[None] for v in vectors))
    outputs, partials = results[: kernel.outputs], results[kernel.outputs :]
    return tuple(outputs), tuple(jnp.sum(p, axis=(0, 1)) for p in partials)
