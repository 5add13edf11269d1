"""Attention on a TPU that writes neither scores nor a mask to memory: Pallas splash attention, causal.

The kernels compare a key's slot (its index in the row) with a number of the query, and compare the segments of both.
Causality by slot and segment equals causality by position, because documents are packed in order.

- As many queries as keys: query i stands in slot i. The blocks to visit are known when the program is made.
- Fewer queries (Mixture-of-Depths), or a window: slots follow from `Where` when the program runs, and so do the blocks
  to visit: for each block of queries, from the first block with a key that one of them sees to the last. For this the
  rows of a batch are laid end to end: a kernel has one table of blocks, and vmap over tables would be a loop.

A window is a range of positions, which have gaps if only selected tokens are seen. So it is converted to the first slot
that a query sees, which is packed into the query's number together with its own slot.

Source: Dao 2023, arXiv:2307.08691, in `jax.experimental.pallas.ops.tpu.splash_attention`. Numerics: scores, softmax and
sums in float32; queries are scaled in their own dtype.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from nagjax.layers.flash import seen_keys
from nagjax.layers.platform import head_axis
from nagjax.layers.where import Where, Window
from pallas_kernels.placement import current_placement

BLOCK = 128  # the number of keys must be a multiple of this
BLOCKS = (512, 256, BLOCK)  # queries or keys in a kernel at a time; larger blocks reread the others less often


def refusal(queries: int, keys: int, rows: int, parts: int, window: Window, causal: bool) -> str | None:
    """Why splash attention does not support this input; None if it does. `queries` and `keys`: tokens in each of a
    device's `rows`; `parts`: the number of parts into which the queries are split over devices."""
    if not causal:
        return "does not support bidirectional attention: choose auto or xla"
    if keys % (parts * BLOCK) or queries > keys or queries < keys and parts > 1:
        return (
            f"does not support {queries} queries and {keys} keys in {parts} parts: each part needs a multiple of "
            f"{BLOCK} keys, and at most as many queries (exactly as many if there are several parts); choose context "
            "accordingly, or attention=xla"
        )
    if window is not None and rows * keys << _bits(keys, window) > 2**31:
        return f"does not support block.window with {rows} rows of {keys} tokens on a device: choose auto or xla"
    return None


def splash(
    q: Float[Array, "B Tq H Dh"],
    k: Float[Array, "B Tk K Dh"],
    v: Float[Array, "B Tk K Dh"],
    q_where: Where,
    k_where: Where,
    window: Window,
    parts: int,
) -> Float[Array, "B Tq H Dh"]:
    """`nagjax.layers.attend.attend` for an input that has no `refusal`. k and v are not split over tokens."""
    placement, ahead = current_placement(), q.shape[1] == k.shape[1] and window is None
    if ahead:
        block = _key_block(q.shape[1] // parts)
        local, seen = _by_slot, _kernel((q.shape[1], k.shape[1]), (block, block), parts)
    else:
        bits = None if window is None else _bits(k.shape[1], window)
        local, seen = functools.partial(_by_stretch, bits=bits), seen_keys(q_where, k_where, window)
    arrays = seen, q * q.shape[-1] ** -0.5, k, v, q_where.segments, k_where.segments
    if placement is None:
        return local(*arrays)
    mesh, batch, split = placement.mesh, placement.rows[0], placement.rows[1] if parts > 1 else None
    heads, mine, whole = head_axis(mesh, k.shape[2]), P(batch, split), P(batch, None)
    queries, keys = P(*mine, heads, None), P(*whole, heads, None)
    by_block = cast(Any, seen).manual_sharding_spec(NamedSharding(mesh, P(None, split))) if ahead else mine
    specs = by_block, queries, keys, keys, mine, whole
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=queries, check_vma=False)(*arrays)


def _by_slot(kernel, q, k, v, q_segments, k_segments) -> Float[Array, "B T H Dh"]:
    """Attention in which query i of a row stands in slot i."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    def one(q, k, v, q_segments, k_segments):
        ids = splash_attention_kernel.SegmentIds(q_segments, k_segments)
        heads_first = (x.swapaxes(0, 1) for x in (q, k, v))
        return kernel(*heads_first, segment_ids=ids).swapaxes(0, 1)

    return jax.vmap(one)(q, k, v, q_segments, k_segments)


def _by_stretch(seen, q, k, v, q_segments, k_segments, *, bits: int | None) -> Float[Array, "B Tq H Dh"]:
    """Attention in which each query sees a range of keys. seen: for each query the index of the first key that it sees
    and the index after the last. bits: the number of low bits of a query's number that say how far the first key is
    before the last; None: a query sees back to the start of its document."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    (batch, queries, heads, width), keys = q.shape, k.shape[1]
    rows, columns = _query_block(queries), _key_block(keys)
    spare = -queries % rows
    first, end, q_segments = (jnp.pad(x, ((0, 0), (0, spare)), mode="edge") for x in (*seen, q_segments))
    numbers = end - 1 + keys * jnp.arange(batch)[:, None]
    if bits is not None:
        numbers = (numbers << bits) + jnp.clip(end - 1 - first, 0, (1 << bits) - 1)
    kernel = _kernel_for(_visited(first, end, keys, rows, columns), numbers.reshape(-1), rows, columns, bits)
    ids = splash_attention_kernel.SegmentIds(q_segments.reshape(-1), k_segments.reshape(-1))
    q = jnp.pad(q, ((0, 0), (0, spare), (0, 0), (0, 0)))
    mixed = kernel(*(x.transpose(2, 0, 1, 3).reshape(x.shape[2], -1, width) for x in (q, k, v)), segment_ids=ids)
    return mixed.reshape(heads, batch, -1, width).transpose(1, 2, 0, 3)[:, :queries]


def _visited(
    first: Int[Array, "B Tq"], end: Int[Array, "B Tq"], keys: int, rows: int, columns: int
) -> Bool[Array, "B n m"]:
    """Which blocks of keys each block of queries visits: from the block with the first key that one of its queries sees
    to the block with the last, and at least one block."""
    blocks = first.shape[0], -1, rows
    last = jnp.max(end.reshape(blocks), axis=-1, keepdims=True) - 1
    begin = jnp.minimum(jnp.min(first.reshape(blocks), axis=-1, keepdims=True), keys - 1) // columns
    place = jnp.arange(keys // columns)
    return (begin <= place) & (place <= jnp.maximum(last // columns, begin))


def _table(visited: Bool[Array, "B n m"], axis: int) -> dict[str, Int[Array, "1 _ _"]]:
    """For each step along this axis (1: blocks of queries, 2: blocks of keys), the block to hold, numbered over all
    rows, and whether it is visited. For a block that is not visited, the nearest visited block is named instead: then
    nothing new is read."""
    count = visited.shape[axis]
    first = jnp.argmax(visited, axis=axis, keepdims=True)
    last = count - 1 - jnp.argmax(jnp.flip(visited, axis), axis=axis, keepdims=True)
    step = jnp.arange(count).reshape((-1, 1) if axis == 1 else (1, -1))
    block = jnp.clip(step, first, last) + count * jnp.arange(visited.shape[0])[:, None, None]
    table = {"data_next": block.astype(jnp.int32), "block_mask": visited.astype(jnp.int32)}
    if axis == 1:
        return {name: x.swapaxes(0, 1).reshape(1, count, -1) for name, x in table.items()}
    return {name: x.reshape(1, -1, count) for name, x in table.items()}


def _kernel_for(visited: Bool[Array, "B n m"], numbers: Int[Array, " N"], rows: int, columns: int, bits: int | None):
    """The kernel for queries with these numbers, which visits these blocks."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    of = functools.partial(MaskInfo, mask_next=None, partial_mask_blocks=None, q_sequence=numbers)
    by_query, by_key = of(**_table(visited, 2)), of(**_table(visited, 1))
    kwargs = _kernel((rows, columns), (rows, columns), 1).kwargs
    if bits is not None:
        kwargs = kwargs | {"mask_function": _within(bits)}
    return splash_attention_kernel.SplashAttentionKernel(by_query, by_query, by_key, **kwargs)


@functools.cache
def _within(bits: int) -> Callable[[Array, Array], Array]:
    """The mask function of a window: whether a query sees the key in a slot. The high bits of the query's number are
    its last slot, the low bits say how far it sees back from there."""

    def within(number, slot):
        own = number >> bits
        return (slot <= own) & (slot >= own - (number & ((1 << bits) - 1)))

    return within


def _bits(keys: int, window: Window) -> int:
    """The number of bits that hold how far back a query sees. A traced window is not known when the kernel is made."""
    return (min(keys, window) - 1 if isinstance(window, int) else keys - 1).bit_length()


def _kernel(shape: tuple[int, int], blocks: tuple[int, int], parts: int):
    """The causal kernel for this number of queries and keys, in blocks of these sizes. With several parts, its mask is
    split over that many devices."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask(shape)])  # one mask for all heads
    rows, columns = blocks
    sizes = splash_attention_kernel.BlockSizes(
        **{"block_q": rows, "block_q_dkv": rows, "block_q_dq": rows},
        **{"block_kv": columns, "block_kv_dkv": columns, "block_kv_dq": columns},
    )
    return splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=parts, block_sizes=sizes)


def _key_block(tokens: int) -> int:
    return next(block for block in BLOCKS if tokens % block == 0)


def _query_block(queries: int) -> int:
    """The largest block of queries with which padding to whole blocks adds at most an eighth."""
    return next((block for block in BLOCKS if -queries % block <= queries // 8), BLOCK)
