"""Attention on a TPU that writes neither scores nor a mask to memory: Pallas splash attention, causal.

Its kernels compare the slot of a key in its row with a number of the query, and their segments. Causality by slot and
segment equals causality by position: documents are packed in order.

- As many queries as keys: query i stands in slot i. Which blocks are visited is known when the program is made.
- Fewer queries (Mixture-of-Depths), or a window: slots follow from `Where` when the program runs, and so do the blocks
  that are visited, for each block of queries from the first that one of them sees to the last. The rows of a batch are
  laid end to end for this: a kernel has one table of blocks, and vmap over tables is a loop.

A window is one of positions, which have gaps where only selected tokens are seen. So it becomes the first slot that a
query sees, which is packed into the query's number with its own slot.

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

BLOCK = 128  # keys come in whole blocks of so many
BLOCKS = (512, 256, BLOCK)  # queries or keys that a kernel holds at a time: the more, the less often others are read


def refusal(queries: int, keys: int, rows: int, parts: int, window: Window, causal: bool) -> str | None:
    """Why splash attention does not take so many queries and keys in each of a device's rows, the queries being split
    into so many parts; None where it does."""
    if not causal:
        return "does not support bidirectional attention: choose auto or xla"
    if keys % (parts * BLOCK) or queries > keys or queries < keys and parts > 1:
        return (
            f"needs whole blocks of {BLOCK} keys in each part, and no more queries (as many if there are parts), not "
            f"{queries} queries and {keys} keys in {parts} parts: choose context accordingly, or attention=xla"
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
    """`nagjax.layers.attend.attend` for what has no `refusal`; k and v are whole."""
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
    """Query i of a row stands in slot i."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    def one(q, k, v, q_segments, k_segments):
        ids = splash_attention_kernel.SegmentIds(q_segments, k_segments)
        heads_first = (x.swapaxes(0, 1) for x in (q, k, v))
        return kernel(*heads_first, segment_ids=ids).swapaxes(0, 1)

    return jax.vmap(one)(q, k, v, q_segments, k_segments)


def _by_stretch(seen, q, k, v, q_segments, k_segments, *, bits: int | None) -> Float[Array, "B Tq H Dh"]:
    """seen: of each query the first key in the row that it sees, and the one behind the last. bits: of its number, for
    how far back the first is from the last; None: it sees as far back as its document goes."""
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
    """Which blocks of keys a block of queries visits, at least one: from that with the first key which one of them sees
    to that with the last."""
    blocks = first.shape[0], -1, rows
    last = jnp.max(end.reshape(blocks), axis=-1, keepdims=True) - 1
    begin = jnp.minimum(jnp.min(first.reshape(blocks), axis=-1, keepdims=True), keys - 1) // columns
    place = jnp.arange(keys // columns)
    return (begin <= place) & (place <= jnp.maximum(last // columns, begin))


def _table(visited: Bool[Array, "B n m"], axis: int) -> dict[str, Int[Array, "1 _ _"]]:
    """For each step along this axis (1: blocks of queries, 2: of keys) the block to hold, among those of all rows, and
    whether it is visited. Instead of one that is not, the nearest that is: then nothing is read."""
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
    """The kernel for queries with these numbers."""
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
    """Whether a query sees the key in a slot, in a window: the low bits of its number are how far it sees back from the
    slot that the high ones are."""

    def within(number, slot):
        own = number >> bits
        return (slot <= own) & (slot >= own - (number & ((1 << bits) - 1)))

    return within


def _bits(keys: int, window: Window) -> int:
    """Bits for how far back a query sees. The kernel is made before a traced window is known."""
    return (min(keys, window) - 1 if isinstance(window, int) else keys - 1).bit_length()


def _kernel(shape: tuple[int, int], blocks: tuple[int, int], parts: int):
    """The causal kernel for so many queries and keys, in blocks of so many; with several parts, its mask is to be split
    among as many devices."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask(shape)])  # of every head
    rows, columns = blocks
    sizes = splash_attention_kernel.BlockSizes(
        **{"block_q": rows, "block_q_dkv": rows, "block_q_dq": rows},
        **{"block_kv": columns, "block_kv_dkv": columns, "block_kv_dq": columns},
    )
    return splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=parts, block_sizes=sizes)


def _key_block(tokens: int) -> int:
    return next(block for block in BLOCKS if tokens % block == 0)


def _query_block(queries: int) -> int:
    """The largest that makes at most an eighth more of them, in whole blocks."""
    return next((block for block in BLOCKS if -queries % block <= queries // 8), BLOCK)
