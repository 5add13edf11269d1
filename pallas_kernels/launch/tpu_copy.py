"""Move rows by index on a TPU: one DMA per row, straight from or into memory, a block of them in flight.

Only 32-bit rows: two 16-bit rows share the words of a memory tile, and no DMA moves one without the other. For those,
XLA's gather and scatter do.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.launch import interpreter

PLATFORMS = ("tpu",)

BLOCK_BYTES = 2 * 2**20
MAX_BLOCK = 128


def refusal(x: jax.Array, *others: jax.Array, **constants) -> str | None:
    """Why `[..., D]` rows cannot be moved one by one."""
    if jnp.dtype(x.dtype).itemsize != 4:
        return f"{x.dtype.name} rows share the words of a tile with their neighbours; accepted: float32"
    if 8 * x.shape[-1] * 4 > BLOCK_BYTES:
        return f"D = {x.shape[-1]}: 8 rows exceed {BLOCK_BYTES >> 20} MiB of VMEM"
    return None


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """`x[indices]`."""

    def kernel(index, x_ref, out, semaphore):
        _copy_rows(lambda j: (x_ref.at[pl.ds(index[0, 0, j], 1)], out.at[pl.ds(j, 1)]), index, indices, semaphore)

    size, index_spec, row_spec = _blocks(indices, x.shape[1])
    out = jax.ShapeDtypeStruct((indices.shape[0], x.shape[1]), x.dtype)
    return _call(kernel, out, size, (indices, x), (index_spec, pl.BlockSpec(memory_space=pl.ANY)), row_spec, {}, "take")


def put(x: jax.Array, rows: jax.Array, indices: jax.Array) -> jax.Array:
    """`x` with `rows` at `indices`, in its own memory."""

    def kernel(index, rows_ref, x_ref, out, semaphore):
        _copy_rows(lambda j: (rows_ref.at[pl.ds(j, 1)], out.at[pl.ds(index[0, 0, j], 1)]), index, indices, semaphore)

    size, index_spec, row_spec = _blocks(indices, x.shape[1])
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return _call(kernel, x, size, (indices, rows, x), (index_spec, row_spec, whole), whole, {2: 0}, "put")


def _blocks(indices: jax.Array, width: int):
    """Rows per block, and how the indices and the compact rows are cut into blocks."""
    size = MAX_BLOCK
    while size > 8 and (size * width * 4 > BLOCK_BYTES or size // 2 >= indices.shape[0]):
        size //= 2
    index_spec = pl.BlockSpec((1, 1, size), lambda i: (i, 0, 0), memory_space=pltpu.SMEM)
    return size, index_spec, pl.BlockSpec((size, width), lambda i: (i, 0))


def _copy_rows(ends: Callable, index, indices: jax.Array, semaphore) -> None:
    """Start the DMA of every row of the block, then wait for all."""
    size = index.shape[2]
    count = jnp.minimum(size, indices.shape[0] - pl.program_id(0) * size)

    def start(j, carry):
        pltpu.make_async_copy(*ends(j), semaphore).start()
        return carry

    def wait(j, carry):
        pltpu.make_async_copy(*ends(j), semaphore).wait()
        return carry

    jax.lax.fori_loop(0, count, start, 0)
    jax.lax.fori_loop(0, count, wait, 0)


def _call(kernel, like, size, inputs, in_specs, out_spec, aliases, verb):
    indices, *arrays = inputs
    (k,), blocks = indices.shape, pl.cdiv(indices.shape[0], size)
    moved = k * (2 * like.shape[1] * like.dtype.itemsize + 4)
    return pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=list(in_specs),
        out_specs=out_spec,
        out_shape=jax.ShapeDtypeStruct(like.shape, like.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpreter(),
        name=f"{verb}_rows",
    )(jnp.pad(indices, (0, blocks * size - k)).reshape(blocks, 1, size), *arrays)
