"""`nag_update` as a Mosaic kernel: blocks of whole rows, double-buffered through VMEM.

Why this exists: XLA on TPU does not fuse a row reduction with what consumes it, and visits every row three
times. Here a block is read once and written once, forward and backward.
Numerics: rows are widened to float32 on chip and rounded once on the way out.
Backend: any width (Mosaic masks the lanes beyond it) and any number of rows (what lies beyond the last row is
computed from whatever memory holds, row by row, and never stored). Turns travel as `[blocks, 1, R]`, because
a column of one float per row would be padded to 128 lanes in memory; a masked sum over an R x R square turns
them into the column that the rows need, and back. The log lane, one float per row, stays with XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import interpreter
from pallas_kernels.nag_update import algebra, block
from pallas_kernels.nag_update.cost import estimate

PLATFORMS = ("tpu",)

# Mosaic may use 16 MiB of VMEM on the smallest target (v5e); the rest is for what the compiler spills.
VMEM_BYTES = 12 * 2**20
MAX_ROWS = 256  # the R x R square of the column trick stays a quarter of a [R, 1024] tile
TENSORS = {"forward": 3, "backward": 5}


def refusal(direction, log_norm, update, turn) -> str | None:
    for name, x in (("direction", direction), ("update", update)):
        if jnp.dtype(x.dtype).itemsize not in (2, 4):
            return f"{name} is {x.dtype.name}; accepted: float32, bfloat16, float16"
    width, least = direction.shape[-1], tile_rows(direction, update)
    if least * row_bytes(width, "backward", direction, update) > VMEM_BYTES:
        return f"D = {width}: {least} rows exceed {VMEM_BYTES >> 20} MiB of VMEM"
    return None


def tile_rows(*arrays) -> int:
    """Rows of one hardware tile: 8 of a 32-bit type, 16 of a 16-bit one."""
    return 32 // min(jnp.dtype(a.dtype).itemsize for a in arrays)


def row_bytes(width: int, direction: str, *arrays) -> int:
    """VMEM for one row: two buffers per tensor, and float32 copies of what is alive at once."""
    lanes = -(-width // 128) * 128
    size = max(jnp.dtype(a.dtype).itemsize for a in arrays)
    tensors = TENSORS[direction]
    return lanes * (2 * tensors * size + 4 * tensors)


def block_rows(n: int, width: int, direction: str, *arrays) -> int:
    """Rows per block: a power of two within the VMEM budget, no more than `n` needs."""
    least, rows = tile_rows(*arrays), MAX_ROWS
    while rows > least and (rows * row_bytes(width, direction, *arrays) > VMEM_BYTES or rows // 2 >= n):
        rows //= 2
    return rows


def forward(direction, log_norm, update, turn):
    (out,), _ = _call("forward", (direction, update), (turn,), (direction.dtype,), 0)
    return (out, algebra.grown(log_norm, turn)), ()


def backward(residuals, cotangents):
    direction, update, turn = residuals
    g, ds = cotangents
    (dr, du), (dt,) = _call("backward", (direction, update, g), (turn,), (direction.dtype, update.dtype), 1)
    return dr, ds, du, dt + algebra.log_lane_gradient(ds, turn)


def _call(direction: str, rows, scalars, out_dtypes, out_scalars: int):
    """One pass over `[N, D]` arrays and `[N]` float32 scalars, giving new ones."""
    n, width = rows[0].shape
    size = block_rows(n, width, direction, *rows)
    blocks = pl.cdiv(n, size)

    def kernel(*refs):
        ins, outs = refs[: len(rows) + len(scalars)], refs[len(rows) + len(scalars) :]
        wide = [ref[...].astype(jnp.float32) for ref in ins[: len(rows)]]
        results = getattr(block, direction)(*wide, *(to_column(ref[0]) for ref in ins[len(rows) :]), width)
        results = results if isinstance(results, tuple) else (results,)
        for ref, value in zip(outs, results, strict=True):
            if len(ref.shape) == 3:
                ref[0] = to_row(value)
            else:
                ref[...] = value.astype(ref.dtype)

    row_spec = pl.BlockSpec((size, width), lambda i: (i, 0))
    scalar_spec = pl.BlockSpec((1, 1, size), lambda i: (i, 0, 0))
    results = pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=[row_spec] * len(rows) + [scalar_spec] * len(scalars),
        out_specs=[row_spec] * len(out_dtypes) + [scalar_spec] * out_scalars,
        out_shape=[jax.ShapeDtypeStruct((n, width), d) for d in out_dtypes]
        + [jax.ShapeDtypeStruct((blocks, 1, size), jnp.float32)] * out_scalars,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=estimate(n, width, rows[0].dtype, backward=direction == "backward"),
        interpret=interpreter(),
        name=f"nag_update_{direction}",
    )(*rows, *(blocked(s, blocks, size) for s in scalars))
    return results[: len(out_dtypes)], [s.reshape(-1)[:n] for s in results[len(out_dtypes) :]]


def blocked(scalars: jax.Array, blocks: int, size: int) -> jax.Array:
    """`[N]` as `[blocks, 1, size]`, zeros beyond the last row."""
    return jnp.pad(scalars, (0, blocks * size - scalars.shape[0])).reshape(blocks, 1, size)


def to_column(row: jax.Array) -> jax.Array:
    """`[1, R]` along the lanes to `[R, 1]` along the sublanes."""
    return jnp.sum(jnp.where(_diagonal(row.shape[1]), row, 0.0), axis=1, keepdims=True)


def to_row(column: jax.Array) -> jax.Array:
    """`[R, 1]` along the sublanes to `[1, R]` along the lanes."""
    return jnp.sum(jnp.where(_diagonal(column.shape[0]), column, 0.0), axis=0, keepdims=True)


def _diagonal(n: int) -> jax.Array:
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))
    return rows == columns
