"""Run a `RowKernel` on a GPU through Pallas-Triton.

Triton's arrays are powers of two, so a block covers the next power of two of columns and masks the rest;
narrow rows share a block. A kernel with sums over rows starts a fixed number of programs, each walking its
share of the blocks in order with one float32 partial row per sum, added up outside: the order depends on
shapes alone.

JAX has announced the end of Pallas-Triton. Nothing but this launcher depends on it: the arithmetic is in the
ops' `block.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.blocks import RowKernel
from pallas_kernels.dispatch import interpreter

PLATFORMS = ("cuda", "rocm")

# A multiprocessor has 65536 registers. What of a row is alive at once may exceed them a little (the rest spills
# into the first-level cache), not by a lot.
ROW_VALUES = 98304
BLOCK_ELEMENTS = 2048
PER_THREAD = 8  # of a tensor: one 16-byte load of 16-bit values
PROGRAMS = 528  # four for each of the 132 multiprocessors of an H100 or H200


def block_shape(n: int, width: int) -> tuple[int, int]:
    """Rows and (padded) columns of a block, both powers of two."""
    columns = pl.next_power_of_2(width)
    rows = max(1, BLOCK_ELEMENTS // columns)
    return min(rows, pl.next_power_of_2(n)), columns


def warps(n: int, width: int) -> int:
    rows, columns = block_shape(n, width)
    return min(max(rows * columns // (32 * PER_THREAD), 1), 32)


def refusal(kernel: RowKernel, width: int, dtype: object) -> str | None:
    """Why rows of this width and dtype cannot be taken."""
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"{jnp.dtype(dtype).name} rows; accepted: float32, bfloat16, float16"
    values = kernel.tensors + kernel.sums
    if pl.next_power_of_2(width) * values > ROW_VALUES:
        widest = 1 << (ROW_VALUES // values).bit_length() - 1
        return f"D = {width}; accepted: up to {widest}, a row has to fit into one program's registers"
    return None


def programs(kernel: RowKernel, n: int, width: int) -> int:
    blocks = pl.cdiv(n, block_shape(n, width)[0])
    return min(blocks, PROGRAMS) if kernel.sums else blocks


def expected_bytes_moved(kernel: RowKernel, n: int, width: int, dtype: object) -> int:
    """Bytes of one pass: every tensor once, and one float32 partial row per program and sum."""
    return kernel.bytes_moved(n, width, dtype, programs(kernel, n, width))


def rows_call(
    kernel: RowKernel, rows: Sequence[jax.Array], vectors: Sequence[jax.Array], **constants: float
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """`kernel` over all rows: its `[N, D]` outputs in the dtype of the rows, and its float32 `[D]` sums."""
    (n, width), dtype = rows[0].shape, rows[0].dtype
    block, columns = block_shape(n, width)
    blocks, grid = pl.cdiv(n, block), programs(kernel, n, width)

    def program(*refs):
        row_refs, refs = refs[: len(rows)], refs[len(rows) :]
        vector_refs, refs = refs[: len(vectors)], refs[len(vectors) :]
        out_refs, sum_refs = refs[: kernel.outputs], refs[kernel.outputs :]
        column = jnp.arange(columns)
        inside = column < width
        given = [plgpu.load(v.at[column], mask=inside, other=0.0)[None] for v in vector_refs]

        def one_block(index, partials):
            row = index * block + jnp.arange(block)
            at = row[:, None], column[None]
            mask = (row < n)[:, None] & inside[None]
            values = [plgpu.load(r.at[at], mask=mask, other=0.0).astype(jnp.float32) for r in row_refs]
            outputs, summands = kernel.body(values, given, width=width, dtype=dtype, **constants)
            for ref, value in zip(out_refs, outputs, strict=True):
                plgpu.store(ref.at[at], value.astype(dtype), mask=mask)
            return tuple(p + s for p, s in zip(partials, summands, strict=True))

        start = pl.program_id(0)
        zeros = (jnp.zeros((block, columns), jnp.float32),) * kernel.sums
        if not kernel.sums:
            one_block(start, ())
            return
        mine = (blocks - start + grid - 1) // grid
        partials = jax.lax.fori_loop(0, mine, lambda i, p: one_block(start + i * grid, p), zeros)
        for ref, partial in zip(sum_refs, partials, strict=True):
            plgpu.store(ref.at[start, column], jnp.sum(partial, axis=0), mask=inside)

    call = pl.pallas_call(
        program,
        grid=(grid,),
        out_shape=[jax.ShapeDtypeStruct((n, width), dtype)] * kernel.outputs
        + [jax.ShapeDtypeStruct((grid, width), jnp.float32)] * kernel.sums,
        compiler_params=plgpu.CompilerParams(num_warps=warps(n, width), num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=8 * kernel.tensors * n * width,
            transcendentals=kernel.transcendentals * n * width,
            bytes_accessed=expected_bytes_moved(kernel, n, width, dtype),
        ),
        interpret=interpreter(),
        name=kernel.name,
    )
    results = call(*rows, *(v.astype(jnp.float32) for v in vectors))
    outputs, partials = results[: kernel.outputs], results[kernel.outputs :]
    return tuple(outputs), tuple(jnp.sum(p, axis=0) for p in partials)
