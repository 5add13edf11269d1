"""Row kernels on a TPU: a grid over blocks of whole rows, double-buffered through VMEM by Mosaic.

XLA:TPU does not fuse a row sum with its users, and visits a row once for every sum that depends on another. Here a
block holds full rows, so it is read once and written once, however many statistics it needs. Any width works: Mosaic
masks the lanes beyond it. Any number of rows works: rows beyond the last one are computed from arbitrary memory
contents, but never stored, and excluded from sums.

One float per row is stored as `[blocks, 1, R]`, because a column of them would be padded to 128 lanes in memory; a
masked sum over an R x R square converts it to the column that the rows need, and back.

Sums over rows accumulate in a block of 8 partial rows that stays on chip (one per sublane: a block adds vectors and
never crosses sublanes), in the order of the blocks. If the number of blocks is even, the grid has two such halves, for
chips with two cores; their partial rows are added up outside.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.launch import Arrays, Block, Results, RowKernel, interpreter, parted, varying_as

PLATFORMS = ("tpu",)

SUBLANES, LANES = 8, 128
# Mosaic may use 16 MiB of VMEM on the smallest target (v5e) unless a program raises the limit. The rest is for register
# spills.
VMEM_BYTES = 12 * 2**20
MAX_ROWS = 512
MAX_ROWS_OF_SCALARS = 256  # the R x R square of the column trick stays a quarter of a [R, 1024] tile


def unavailable(platform: str) -> None:
    return None


def row_bytes(kernel: RowKernel, *rows: jax.Array) -> int:
    """VMEM for one row, in bytes: two buffers per tensor, and one float32 copy of each tensor and summand."""
    size = max(jnp.dtype(x.dtype).itemsize for x in rows)
    return lanes(rows[0].shape[-1]) * (2 * kernel.tensors * size + 4 * (kernel.tensors + kernel.sums))


def lanes(width: int) -> int:
    """A row's elements in VMEM, padded to whole lanes."""
    return pl.cdiv(width, LANES) * LANES


def tile_rows(*rows: jax.Array) -> int:
    """Rows in one hardware tile: 8 of a 32-bit type, 16 of a 16-bit one."""
    return SUBLANES * 4 // min(jnp.dtype(x.dtype).itemsize for x in rows)


def block_rows(kernel: RowKernel, *rows: jax.Array, reserved: int = 0) -> int:
    """Rows per block: a power of two within the VMEM budget minus `reserved` bytes, no more than needed."""
    size = MAX_ROWS_OF_SCALARS if kernel.scalars else MAX_ROWS
    budget, n = VMEM_BYTES - reserved, rows[0].shape[0]
    while size > tile_rows(*rows) and (size * row_bytes(kernel, *rows) > budget or size // 2 >= n):
        size //= 2
    return size


def grid(kernel: RowKernel, *rows: jax.Array) -> tuple[int, int]:
    """The number of independent parts of the grid, and the number of blocks in each."""
    blocks = pl.cdiv(rows[0].shape[0], block_rows(kernel, *rows))
    parts = math.gcd(blocks, 2) if kernel.sums else blocks
    return parts, blocks // parts


def refusal(kernel: RowKernel, *rows: jax.Array) -> str | None:
    """Why rows of this width and these dtypes are not supported, or None."""
    for x in rows:
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{jnp.dtype(x.dtype).name} rows; accepted: float32, bfloat16"
    least = tile_rows(*rows)
    if least * row_bytes(kernel, *rows) > VMEM_BYTES:
        return f"D = {rows[0].shape[-1]}: {least} rows exceed {VMEM_BYTES >> 20} MiB of VMEM"
    return None


def bytes_moved(kernel: RowKernel, n: int, width: int, dtype: object) -> int:
    """Bytes of one pass: every array once, and 8 float32 partial rows per part of the grid and sum."""
    parts, _ = grid(kernel, jax.ShapeDtypeStruct((n, width), dtype))
    return kernel.bytes_moved(n, width, dtype, SUBLANES * parts)


def rows_call(
    kernel: RowKernel, rows: Arrays, scalars: Arrays = (), vectors: Arrays = (), *, like: Arrays = (), **constants
) -> Results:
    """Runs `kernel` over all rows: its `[N, D]` outputs typed as `like` (default: as the first rows), `[N]` scalars,
    and float32 `[D]` sums."""
    (n, width), dtype = rows[0].shape, rows[0].dtype
    size, (parts, _) = block_rows(kernel, *rows), grid(kernel, *rows)

    def block(first, rows, scalars, vectors):
        wide = [x.astype(jnp.float32) for x in rows]
        outputs, computed, summands = kernel.body(Block(width, dtype), wide, scalars, vectors, **constants)
        if not summands:
            return outputs, computed, ()
        # The last block may reach beyond the rows, where memory holds anything, NaN included.
        row = first + jax.lax.broadcasted_iota(jnp.int32, (size, width), 0)
        kept = (jnp.where(row < n, x, 0.0).reshape(size // SUBLANES, SUBLANES, width) for x in summands)
        return outputs, computed, [jnp.sum(x, axis=0) for x in kept]

    outputs, computed, partials = launch(
        block,
        rows,
        [scalars[i] for i in kernel.reads],
        [v.astype(jnp.float32)[None] for v in vectors],
        size=size,
        parts=parts,
        outputs=like or rows[:1] * kernel.outputs,
        scalar_outputs=kernel.computes,
        sums=[(SUBLANES, width)] * kernel.sums,
        cost=kernel.cost(n, width, bytes_moved(kernel, n, width, dtype)),
        name=kernel.name,
    )
    return outputs, tuple(kernel.lane(scalars, computed)), tuple(jnp.sum(p, axis=(0, 1)) for p in partials)


def launch(
    block: Callable, rows: Arrays, scalars: Arrays, whole: Arrays, *, size: int, parts: int, outputs: Arrays,
    scalar_outputs: int = 0, sums: Sequence[tuple[int, ...]] = (), cost: pl.CostEstimate, name: str
) -> Results:  # fmt: skip
    """Launches one pass in blocks of `size` rows, on a grid of `parts` independent parts.

    `block(first row, rows, scalars, whole) -> (outputs, scalars, what to add to the sums)` gets `[R, D]` rows as they
    are in memory, `[R, 1]` scalars and all of the 2-D arrays in `whole`. Returns `[N, D]` arrays typed as `outputs`,
    `[N]` float32 arrays, and `[parts, ...]` float32 arrays with the shapes in `sums`.
    """
    n, width = rows[0].shape
    all_blocks = pl.cdiv(n, size)
    blocks = all_blocks // parts

    def program(*refs):
        counts = len(rows), len(scalars), len(whole), len(outputs), scalar_outputs
        row_refs, scalar_refs, whole_refs, out_refs, computed_refs, sum_refs = parted(refs, *counts)
        columns = [to_column(ref[0]) for ref in scalar_refs]
        first = (pl.program_id(0) * blocks + pl.program_id(1)) * size
        given = [ref[...] for ref in row_refs], columns, [ref[...] for ref in whole_refs]
        results, computed, summands = block(first, *given)
        for ref, value in zip(out_refs, results, strict=True):
            ref[...] = value.astype(ref.dtype)
        for ref, value in zip(computed_refs, computed, strict=True):
            ref[0] = _to_row(value)
        if not sum_refs:
            return

        @pl.when(pl.program_id(1) == 0)
        def _():
            for ref in sum_refs:
                ref[...] = jnp.zeros_like(ref)

        for ref, value in zip(sum_refs, summands, strict=True):
            ref[0] += value

    row_spec = pl.BlockSpec((size, width), lambda part, i: (part * blocks + i, 0))
    scalar_spec = pl.BlockSpec((1, 1, size), lambda part, i: (part * blocks + i, 0, 0))
    out = [jax.ShapeDtypeStruct((n, width), x.dtype) for x in outputs]
    out += [jax.ShapeDtypeStruct((all_blocks, 1, size), jnp.float32)] * scalar_outputs
    out += [jax.ShapeDtypeStruct((parts, *shape), jnp.float32) for shape in sums]
    results = pl.pallas_call(
        program,
        grid=(parts, blocks),
        in_specs=[row_spec] * len(rows)
        + [scalar_spec] * len(scalars)
        + [pl.BlockSpec(x.shape, lambda part, i: (0, 0)) for x in whole],
        out_specs=[row_spec] * len(outputs)
        + [scalar_spec] * scalar_outputs
        + [pl.BlockSpec((1, *shape), lambda part, i: (part, 0, 0)) for shape in sums],
        out_shape=varying_as(rows[0], out),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=cost,
        interpret=interpreter(),
        name=name,
    )(*rows, *(blocked(s, all_blocks, size) for s in scalars), *whole)
    wide, narrow, partials = parted(results, len(outputs), scalar_outputs)
    return tuple(wide), tuple(s.reshape(-1)[:n] for s in narrow), tuple(partials)


def blocked(scalars: jax.Array, blocks: int, size: int) -> jax.Array:
    """`[N]` as `[blocks, 1, R]`, zeros beyond the last row."""
    return jnp.pad(scalars, (0, blocks * size - scalars.shape[0])).reshape(blocks, 1, size)


def to_column(row: jax.Array) -> jax.Array:
    """Moves `[1, R]` along the lanes to `[R, 1]` along the sublanes."""
    return jnp.sum(jnp.where(_diagonal(row.shape[1]), row, 0.0), axis=1, keepdims=True)


def _to_row(column: jax.Array) -> jax.Array:
    """Moves `[R, 1]` along the sublanes to `[1, R]` along the lanes."""
    return jnp.sum(jnp.where(_diagonal(column.shape[0]), column, 0.0), axis=0, keepdims=True)


def _diagonal(n: int) -> jax.Array:
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))
    return rows == columns
