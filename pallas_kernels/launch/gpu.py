"""Row kernels on a GPU through Pallas-Triton: a few whole rows per program, one visit each.

Sizes of Triton's arrays are powers of two, so a program covers the next power of two of columns and masks the rest;
narrow rows share a program. A kernel with sums over rows starts a fixed number of programs. Each goes through its share
of the blocks in order with one float32 partial row per sum; the partial rows are added up outside, in an order that
depends only on shapes.

JAX has announced the end of Pallas-Triton, so it is imported only when a kernel is traced, and `unavailable` says if it
is gone. `raw_triton` then launches the same arithmetic, written in Triton, without it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.launch import (
    Arrays,
    Block,
    Launch,
    Results,
    RowKernel,
    interpreter,
    parted,
    traced_platform,
    varying_as,
)

PLATFORMS = ("cuda", "rocm")

# A multiprocessor has 65536 registers. The live values of a row may exceed them a little (the rest spills into the
# first-level cache), but not by much.
ROW_VALUES = 98304
BLOCK_ELEMENTS = 2048
PROGRAMS = 528  # programs of a kernel with sums: four for each of the 132 multiprocessors of an H100 or H200
MAX_WIDTH = 16384  # widest rows that are only copied
MAX_THREADS = 1024
LANES_PER_WARP = {"rocm": 64}  # 32 elsewhere

LEAST_CAPABILITY = (8, 0)  # XLA compiles Triton programs for Ampere and newer only
# Patterns for devices known only by name, as when compiling without the GPU: Ampere, Ada, Hopper, Blackwell.
HOPPER_OR_NEWER = r"\b(G?H\d{2,3}|G?B\d{3})\b"  # names of data-center GPUs
NEW_ENOUGH = (
    r"\b(A\d{1,4}[GX]?|L\d{1,2}S?|G?H\d{2,3}|G?B\d{2,3}|RTX A\d{4}|RTX [3-9]0[5-9]0|RTX \d{4}.* Ada|RTX PRO \d+)\b"
)


def unavailable(platform: str) -> str | None:
    """Why no Pallas-Triton kernel can run on this platform's device, as far as this is known while tracing; None if one
    can."""
    try:
        _triton()
    except ImportError as error:
        return f"this JAX ({jax.__version__}) has no Pallas-Triton ({error})"
    return wrong_capability() if platform == "cuda" else None


def wrong_capability(
    least: tuple[int, int] = LEAST_CAPABILITY, names: str = NEW_ENOUGH, before: tuple[int, int] | None = None
) -> str | None:
    """Why the NVIDIA GPU for which programs are traced is too old or of another kind; None if it is not, or if no GPU
    is known.

    Args:
      least: the oldest compute capability that is supported.
      names: a pattern of device names that have it, for devices that do not report a capability.
      before: the first compute capability that is not supported: 12.0 is consumer Blackwell, which has half of the
        shared memory of data-center Blackwell.
    """
    needed = ".".join(map(str, least))
    accepted = f"{needed} and newer" + (f" before {'.'.join(map(str, before))}" if before else "")
    for device in traced_gpus():
        capability = str(getattr(device, "compute_capability", "")).split(".")
        if len(capability) == 2 and all(x.isdigit() for x in capability):
            found = tuple(map(int, capability))
            if found < least or (before and found >= before):
                return f"{device.device_kind} has compute capability {'.'.join(capability)}; accepted: {accepted}"
        elif not capability[0].startswith("gfx") and not re.search(names, device.device_kind):
            return f"{device.device_kind} is not known to have compute capability {needed} or newer"
    return None


def traced_gpus() -> list:
    """The GPUs for which programs are traced, or their description if they are not present; empty if no GPU is
    known."""
    told = jax.sharding.get_abstract_mesh().abstract_device
    if told is not None and told.platform != "gpu":
        return []
    here = jax.devices() if jax.default_backend() == "gpu" else []
    devices = [d for d in here if told is None or d.device_kind == told.device_kind]
    return devices or ([told] if told else [])


def _triton() -> Any:
    from jax.experimental.pallas import triton

    return triton


def refusal(kernel: RowKernel, *rows: jax.Array) -> str | None:
    """Why rows of this width and these dtypes are not supported, or None."""
    values = kernel.tensors + kernel.sums
    return refuse_rows(1 << (ROW_VALUES // values).bit_length() - 1, *rows)


def refuse_rows(widest: int, *rows: jax.Array) -> str | None:
    """Why rows are not supported if a program can hold up to `widest` columns, or None."""
    for x in rows:
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"{jnp.dtype(x.dtype).name} rows; accepted: float32, bfloat16, float16"
    if rows[0].shape[-1] > widest:
        return f"D = {rows[0].shape[-1]}; accepted: up to {widest}, a row has to fit into one program's registers"
    return None


def block_shape(n: int, width: int) -> tuple[int, int]:
    """Rows and (padded) columns of a block, both powers of two."""
    columns = pl.next_power_of_2(width)
    return min(max(1, BLOCK_ELEMENTS // columns), pl.next_power_of_2(n)), columns


def warps(n: int, width: int, per_thread: int = 16, most: int = 16) -> int:
    """Warps of a program over one block, with `per_thread` elements for each thread."""
    rows, columns = block_shape(n, width)
    return capped(min(max(rows * columns // (32 * per_thread), 1), most))


def capped(warps: int) -> int:
    """The number of warps, limited to what the platform allows: AMD's warps are twice as wide."""
    return min(warps, MAX_THREADS // LANES_PER_WARP.get(traced_platform(), 32))


def programs(kernel: RowKernel, n: int, width: int) -> int:
    blocks = pl.cdiv(n, block_shape(n, width)[0])
    return min(blocks, PROGRAMS) if kernel.sums else blocks


def bytes_moved(kernel: RowKernel, n: int, width: int, dtype: object) -> int:
    """Bytes of one pass: every array once, and one float32 partial row per program and sum."""
    return kernel.bytes_moved(n, width, dtype, programs(kernel, n, width))


def launched(kernel: RowKernel, n: int, width: int, dtype: object) -> Launch:
    """The launch of a kernel. A program has the rows of one block in flight, and they end in its registers."""
    block = block_shape(n, width)[0] * width * jnp.dtype(dtype).itemsize * kernel.rows
    threads = 32 * warps(n, width, kernel.per_thread, kernel.most_warps)
    return Launch(programs(kernel, n, width), threads, 0, block)


FRESH: Mapping[int, int] = {}  # no output takes over an argument's memory


class Tile(NamedTuple):
    """Rows and columns of one program; `load` and `store` take `[N, D]` or `[N]` references."""

    row: jax.Array
    valid: jax.Array
    column: jax.Array
    width: int

    @property
    def inside(self) -> jax.Array:
        """The mask `[1, W]` of the columns that exist."""
        return (self.column < self.width)[None]

    def at(self, indices_ref) -> "Tile":
        """The same tile, with its rows at the positions in `indices_ref`.

        Rows beyond the last one get a position outside of the array: the interpreter, unlike Triton, writes masked
        elements back.
        """
        nowhere = jnp.iinfo(jnp.int32).max
        return self._replace(row=load(indices_ref.at[self.row], mask=self.valid, other=nowhere))

    def load(self, ref, dtype=jnp.float32) -> jax.Array:
        place, mask = self._address(ref)
        return load(ref.at[place], mask=mask, other=0.0).astype(dtype)

    def store(self, ref, value: jax.Array) -> None:
        place, mask = self._address(ref)
        store(ref.at[place], value.astype(ref.dtype), mask=mask)

    def _address(self, ref):
        if len(ref.shape) == 1:
            return self.row, self.valid
        return (self.row[:, None], self.column[None]), self.valid[:, None] & self.inside


def load(ref, **mask) -> jax.Array:
    return _triton().load(ref, **mask)


def store(ref, value: jax.Array, **mask) -> None:
    _triton().store(ref, value, **mask)


def rows_call(
    kernel: RowKernel, rows: Arrays, scalars: Arrays = (), vectors: Arrays = (), *, like: Arrays = (),
    indices: jax.Array | None = None, indirect: Sequence[int] = (), aliases: Mapping[int, int] = FRESH, **constants
) -> Results:  # fmt: skip
    """Runs `kernel` over all rows: its `[N, D]` outputs typed as `like` (default: as the first rows), `[N]` scalars,
    and float32 `[D]` sums.

    With `indices`, it runs only over those rows: the arguments at the positions `indirect` (rows first, then scalars)
    are read at `indices`, the others hold just these rows. `aliases` maps arguments to the outputs that reuse their
    memory, in which only the rows at `indices` are written.
    """
    n, width, dtype = (rows[0] if indices is None else indices).shape[0], rows[0].shape[1], rows[0].dtype
    size, columns = block_shape(n, width)
    blocks, grid = pl.cdiv(n, size), programs(kernel, n, width)
    numbers = (jax.ShapeDtypeStruct((n,), jnp.float32),)
    outs = [jax.ShapeDtypeStruct((n, width), x.dtype) for x in like or rows[:1] * kernel.outputs]
    outs += numbers * kernel.scalar_outputs
    for argument, out in aliases.items():
        outs[out] = (*rows, *scalars)[argument]

    def program(*refs):
        counts = len(rows) + len(scalars), len(vectors), indices is not None, len(outs)
        inputs, vector_refs, index, out_refs, sum_refs = parted(refs, *counts)
        column = jnp.arange(columns)
        inside = column < width
        given = [load(v.at[column], mask=inside, other=0.0)[None] for v in vector_refs]

        def one_block(i, partials):
            row = i * size + jnp.arange(size)
            tile = Tile(row, row < n, column, width)
            there = tile.at(*index) if index else tile
            values = [(there if at in indirect else tile).load(ref) for at, ref in enumerate(inputs)]
            wide, narrow = parted(values, len(rows))
            block = Block(width, dtype, tile.inside)
            read = [narrow[at][:, None] for at in kernel.reads]
            outputs, computed, summands = kernel.body(block, wide, read, given, **constants)
            lane = kernel.lane(narrow, [jnp.sum(x, axis=1) for x in computed])
            for at, (ref, value) in enumerate(zip(out_refs, (*outputs, *lane), strict=True)):
                (there if at in aliases.values() else tile).store(ref, value)
            return tuple(p + s for p, s in zip(partials, summands, strict=True))

        start = pl.program_id(0)
        if not kernel.sums:
            one_block(start, ())
            return
        zeros = (jnp.zeros((size, columns), jnp.float32),) * kernel.sums
        mine = (blocks - start + grid - 1) // grid
        partials = jax.lax.fori_loop(0, mine, lambda i, p: one_block(start + i * grid, p), zeros)
        for ref, partial in zip(sum_refs, partials, strict=True):
            store(ref.at[start, column], jnp.sum(partial, axis=0), mask=inside)

    results = launch(
        program,
        (*rows, *scalars, *(v.astype(jnp.float32) for v in vectors), *([] if indices is None else [indices])),
        [*outs, *[jax.ShapeDtypeStruct((grid, width), jnp.float32)] * kernel.sums],
        grid=grid,
        warps=warps(n, width, kernel.per_thread, kernel.most_warps),
        aliases=aliases,
        cost=kernel.cost(n, width, bytes_moved(kernel, n, width, dtype)),
        name=kernel.name,
    )
    wide, lane, partials = parted(results, kernel.outputs, kernel.scalar_outputs)
    return tuple(wide), tuple(lane), tuple(jnp.sum(p, axis=0) for p in partials)


def launch(
    program: Callable, inputs: Arrays, like: Arrays, *, grid: int, warps: int, cost: pl.CostEstimate, name: str,
    aliases: Mapping[int, int] = FRESH
) -> list[jax.Array]:  # fmt: skip
    """Launches `grid` programs `program(*input_refs, *output_refs)`; results are shaped and typed as `like`."""
    return pl.pallas_call(
        program,
        grid=(grid,),
        out_shape=varying_as(inputs[0], like),
        input_output_aliases=dict(aliases),
        compiler_params=_triton().CompilerParams(num_warps=warps, num_stages=1),
        cost_estimate=cost,
        interpret=interpreter(),
        name=name,
    )(*inputs)


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """`x[indices]`. The indices are read on chip."""

    def copy(tile, x_ref, i_ref, out):
        tile.store(out, tile.at(i_ref).load(x_ref, x.dtype))

    out = jax.ShapeDtypeStruct((indices.shape[0], x.shape[1]), x.dtype)
    return _copied(copy, (x, indices), out, out, "take_rows")


def put(x: jax.Array, rows: jax.Array, indices: jax.Array) -> jax.Array:
    """`x` with `rows` at `indices`, in place."""

    def copy(tile, x_ref, rows_ref, i_ref, out):
        tile.at(i_ref).store(out, tile.load(rows_ref, x.dtype))

    return _copied(copy, (x, rows, indices), x, rows, "put_rows", {0: 0})


def _copied(copy: Callable, inputs, like, selected, name: str, aliases: Mapping[int, int] = FRESH) -> jax.Array:
    k, width = selected.shape
    size, columns = block_shape(k, width)

    def program(*refs):
        row = pl.program_id(0) * size + jnp.arange(size)
        copy(Tile(row, row < k, jnp.arange(columns), width), *refs)

    moved = k * (2 * width * selected.dtype.itemsize + 4)
    cost = pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)
    launched = dict(grid=pl.cdiv(k, size), warps=warps(k, width), cost=cost, name=name, aliases=aliases)
    return launch(program, inputs, [like], **launched)[0]
