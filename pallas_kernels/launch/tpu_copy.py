"""Moves rows by index on a TPU: one DMA per row, directly from or into main memory, one block of rows at a time.

Two 16-bit rows share the words of a memory tile, and no DMA moves one without the other. So bfloat16 rows move in
pairs, as rows of 32-bit words whose low half is the even row: taking a row reads its pair; putting a row reads its
pair, merges the row into it and writes it. That is the traffic of three and of five rows for one row. XLA's gather and
scatter may be faster, which has not been measured, so for bfloat16 these kernels are used only when named.
"""

from collections.abc import Callable, Sequence

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.launch import flat, flat_indices, interpreter, varying_as
from pallas_kernels.launch.tpu import blocked, to_column

PLATFORMS = ("tpu",)

BLOCK_BYTES = 2 * 2**20
MAX_BLOCK = 128
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)


def refusal(x: jax.Array, *others: jax.Array, **constants) -> str | None:
    """Why `[..., D]` rows cannot be moved by these kernels, or None."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"{jnp.dtype(x.dtype).name} rows; accepted: float32, bfloat16"
    least = 32 // jnp.dtype(x.dtype).itemsize
    if least * x.shape[-1] * 4 > BLOCK_BYTES:
        return f"D = {x.shape[-1]}: {least} rows exceed {BLOCK_BYTES >> 20} MiB of VMEM"
    return None


def one_by_one(x: jax.Array) -> bool:
    """Whether each row is moved by its own copy."""
    return not refusal(x) and not reserve(x)


def reserve(x: jax.Array, *others: jax.Array, **constants) -> str | None:
    """Why rows that could be moved are left to XLA unless this implementation is named, or None."""
    if jnp.dtype(x.dtype).itemsize == 2:
        return f"{x.dtype.name} rows share the words of a tile with their neighbours, and move in pairs: only if named"
    return None


@jax.custom_batching.custom_vmap
def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """`x[indices]`."""
    out = jax.ShapeDtypeStruct((indices.shape[0], x.shape[1]), x.dtype)
    size, on_chip, rows = _blocks(out)
    if x.dtype == jnp.float32:

        def kernel(index, x_ref, out, semaphore):
            _copy(index, indices, semaphore, lambda j: (x_ref.at[pl.ds(index[0, 0, j], 1)], out.at[pl.ds(j, 1)]))

        return _call(kernel, "take", size, out, rows, [(indices, on_chip), (x, ANYWHERE)])

    def pairs_kernel(index, odd, x_ref, out, pairs, semaphore):
        words = _words(x_ref)
        _copy(index, indices, semaphore, lambda j: (words.at[pl.ds(index[0, 0, j] // 2, 1)], pairs.at[pl.ds(j, 1)]))
        out[...] = pltpu.bitcast(_half(pairs[...], to_column(odd[0])) << 16, jnp.float32).astype(out.dtype)

    inputs = [(indices, on_chip), (indices % 2, None), (_paired(x), ANYWHERE)]
    return _call(pairs_kernel, "take", size, out, rows, inputs, scratch=1)


@jax.custom_batching.custom_vmap
def put(x: jax.Array, rows: jax.Array, indices: jax.Array) -> jax.Array:
    """`x` with `rows` at `indices`, in place."""
    size, on_chip, row_spec = _blocks(rows)
    if x.dtype == jnp.float32:

        def kernel(index, rows_ref, x_ref, out, semaphore):
            _copy(index, indices, semaphore, lambda j: (rows_ref.at[pl.ds(j, 1)], out.at[pl.ds(index[0, 0, j], 1)]))

        inputs = [(indices, on_chip), (rows, row_spec), (x, ANYWHERE)]
        return _call(kernel, "put", size, x, ANYWHERE, inputs, in_place=True)

    def pairs_kernel(index, partner, odd, side, rows_ref, sources, x_ref, out, pairs, merged, semaphore):
        words, sources = _words(out), _words(sources)

        def neighbour(j):  # the pair in memory, whose other row is kept
            return words.at[pl.ds(index[0, 0, j] // 2, 1)], pairs.at[pl.ds(j, 1)]

        def put_too(j):
            return sources.at[pl.ds(partner[0, 0, j] // 2, 1)], pairs.at[pl.ds(j, 1)]

        _copy(index, indices, semaphore, neighbour, lambda j: partner[0, 0, j] < 0)
        _copy(index, indices, semaphore, put_too, lambda j: partner[0, 0, j] >= 0)
        other = _half(pairs[...], to_column(side[0]))
        own = pltpu.bitcast(rows_ref[...].astype(jnp.float32), jnp.uint32)
        merged[...] = jnp.where(to_column(odd[0]) > 0.5, own | other, (other << 16) | (own >> 16))
        # If both rows of a pair are put, the even one writes both.
        writes = lambda j: (partner[0, 0, j] < 0) | (index[0, 0, j] % 2 == 0)  # noqa: E731
        _copy(index, indices, semaphore, lambda j: neighbour(j)[:1] + (merged.at[pl.ds(j, 1)],), writes, back=True)

    places = jnp.full((x.shape[0] + x.shape[0] % 2,), -1, jnp.int32)
    places = places.at[indices].set(jnp.arange(indices.shape[0], dtype=jnp.int32), unique_indices=True)
    partner, odd = places[indices ^ 1], indices % 2
    side = jnp.where(partner < 0, 1 - odd, partner % 2)
    whole = _paired(x)
    inputs = [(indices, on_chip), (partner, on_chip), (odd, None), (side, None), (rows, row_spec)]
    inputs += [(_paired(rows), ANYWHERE), (whole, ANYWHERE)]
    out = _call(pairs_kernel, "put", size, whole, ANYWHERE, inputs, scratch=2, in_place=True)
    return (_unpaired(out) if interpreter() else out)[: x.shape[0]]


# `pallas_call`'s own vmap rule would cut operands that stay in main memory into blocks, which Mosaic refuses.
@take.def_vmap
def _take_of_each(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
    x, indices = _each(size, batched, arrays)
    return take(flat(x), flat_indices(indices, x.shape[1])).reshape(*indices.shape, x.shape[-1]), True


@put.def_vmap
def _put_of_each(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
    x, rows, indices = _each(size, batched, arrays)
    return put(flat(x), flat(rows), flat_indices(indices, x.shape[1])).reshape(x.shape), True


def _each(size: int, batched: list[bool], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in zip(arrays, batched, strict=True)]


def _blocks(rows: jax.Array) -> tuple[int, pl.BlockSpec, pl.BlockSpec]:
    """Rows per block, and how the indices and the compact rows are cut into blocks."""
    (k, width), size = rows.shape, MAX_BLOCK
    while size > 32 // rows.dtype.itemsize and (size * width * 4 > BLOCK_BYTES or size // 2 >= k):
        size //= 2
    on_chip = pl.BlockSpec((1, 1, size), lambda i: (i, 0, 0), memory_space=pltpu.SMEM)
    return size, on_chip, pl.BlockSpec((size, width), lambda i: (i, 0))


def _copy(index, indices: jax.Array, semaphore, ends: Callable, when: Callable | None = None, back: bool = False):
    """Starts the DMA of every row of the block (with `when`, of the selected rows), then waits for all. back: from the
    second end of each copy to the first."""
    size = index.shape[2]
    count = jnp.minimum(size, indices.shape[0] - pl.program_id(0) * size)

    def each(act):
        def row(j, carry):
            one = lambda: act(pltpu.make_async_copy(*(ends(j)[::-1] if back else ends(j)), semaphore))  # noqa: E731
            pl.when(when(j))(one) if when else one()
            return carry

        jax.lax.fori_loop(0, count, row, 0)

    each(lambda copy: copy.start())
    each(lambda copy: copy.wait())


def _words(ref):
    """A view of 16-bit rows in memory as pairs. The interpreter has no such view, so its inputs are pairs already."""
    return ref if interpreter() else ref.bitcast(jnp.uint32)


def _half(words: jax.Array, side: jax.Array) -> jax.Array:
    """The 16-bit half of each word that belongs to the even (side 0) or the odd (side 1) row."""
    return jnp.where(side > 0.5, words >> 16, words & 0xFFFF)


def _paired(x: jax.Array) -> jax.Array:
    """x padded to an even number of rows; in the interpreter also converted to pairs."""
    x = jnp.pad(x, ((0, x.shape[0] % 2), (0, 0)))
    if not interpreter():
        return x
    return jax.lax.bitcast_convert_type(x.reshape(-1, 2, x.shape[1]).swapaxes(1, 2), jnp.uint32)


def _unpaired(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.bfloat16).swapaxes(1, 2).reshape(-1, words.shape[1])


def _call(kernel, verb: str, size: int, like, out_spec, inputs, *, scratch: int = 0, in_place: bool = False):
    """Launches a kernel. `inputs` are arrays with their specs; `[k]` arrays are cut into blocks, those without a spec
    as float32 in VMEM."""
    (k,), width = inputs[0][0].shape, like.shape[1]
    blocks = pl.cdiv(k, size)
    vector = pl.BlockSpec((1, 1, size), lambda i: (i, 0, 0))
    arrays = [x if x.ndim == 2 else blocked(x if spec else x.astype(jnp.float32), blocks, size) for x, spec in inputs]
    moved = k * ((5 if scratch == 2 else 3 if scratch else 2) * width * like.dtype.itemsize + 4)
    return pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=[spec or vector for _, spec in inputs],
        out_specs=out_spec,
        out_shape=varying_as(arrays[0], [like])[0],
        scratch_shapes=[pltpu.VMEM((size, width), jnp.uint32)] * scratch + [pltpu.SemaphoreType.DMA],
        input_output_aliases={len(inputs) - 1: 0} if in_place else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpreter(),
        name=f"{verb}_rows",
    )(*arrays)
