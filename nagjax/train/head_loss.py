"""The head's loss without the logits of all tokens: cross-entropy in chunks of tokens, with the vocabulary left
sharded.

Why this exists: with a large vocabulary, the float32 logits [B, T, V] and their gradient dominate memory; for 16,384
tokens and 128k entries each takes 8 GiB. Here only the logits of `chunk` tokens exist at a time. If a gradient is
wanted, it is made in the same pass: the loss is a sum, so a chunk's gradient does not depend on the other chunks, and
nothing is computed twice (three matmuls of `2 N V D` FLOPs, as without chunks).

On a mesh, under `shard_map`: tokens stay on the devices that hold them, and the head's rows on the devices of the
vocabulary's axis. Only a few numbers per token (maximum, sum of exponentials, the target's logit, best id) and the
gradient of `hidden` are communicated over that axis, never logits. The gradient of the table is summed over the tokens'
axes once, after all chunks, and split over the axis that splits its features; XLA may turn this into an all-reduce and
a slice.

Numerics: matmuls take the dtype of `hidden` and accumulate in float32; logits, normalisers and sums are float32. The
gradient of the logits is float32 until the two matmuls that consume it, which take it in the dtype of `hidden`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from nagjax.layers.int8 import widened
from nagjax.layers.softcap import softcap
from nagjax.model.transformer import Output, Transformer
from nagjax.train.distributed.mesh import SHARDING_RULES
from nagjax.train.loss import Batch, Sums, cross_entropy
from pallas_kernels.placement import Placement, current_placement

LOGITS = 2**26  # float32 logits that one chunk may hold: 256 MiB
FEWEST = 1024  # least tokens of a chunk, however large the vocabulary


def chunk_tokens(tokens: int, vocab: int) -> int:
    """The number of tokens in a chunk, for a device with `tokens` tokens and `vocab` rows of the head: as many as have
    256 MiB of float32 logits, but at least 1,024. Each chunk adds to the table's gradient, which reads and writes 8 V D
    bytes for 6 c V D FLOPs: with fewer than about 300 tokens a v5e or H200 waits for its memory; from 1,024 the matmuls
    hide it."""
    return min(tokens, max(FEWEST, LOGITS // vocab))


def even_parts(tokens: int, most: int) -> tuple[int, int]:
    """The number of parts of at most `most` tokens that `tokens` split into, and the size of each, as equal as
    possible."""
    count = -(-tokens // most)
    return count, -(-tokens // count)


class Head(NamedTuple):
    """What the loss reads of the model: final features [..., D], their log scale [...], and the table of the head [V,
    D]."""

    hidden: Float[Array, "*N D"]
    log_scale: Float[Array, "*N"]
    rows: Float[Array, "V D"]


class Layout(NamedTuple):
    """What is known before tracing: the placement of tokens and vocabulary on a mesh, tokens per chunk (0:
    `chunk_tokens` decides), the weight of the z-loss, and the soft cap on logits."""

    placement: Placement | None
    chunk: int
    z_weight: float
    cap: float | None = None

    @property
    def shape(self) -> dict[str, int]:
        return dict(self.placement.mesh.shape) if self.placement else {}

    def splits(self, axis: str, size: int) -> str | None:
        """The mesh axis that splits a table's dimension of this size, by the same rule as `parameter_sharding`; None if
        none does."""
        name = str(SHARDING_RULES[axis])
        parts = self.shape.get(name, 1)
        return name if parts > 1 and size % parts == 0 else None

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes that split rows, in the order in which they split them."""
        named = self.placement.axes() if self.placement else ()
        return tuple(name for name in named if self.shape[name] > 1)


def head_loss(
    model: Transformer, output: Output, batch: Batch, *, z_weight: float = 0.0, chunk: int | None = None
) -> tuple[Float[Array, ""], Sums]:
    """The training loss `nats + z_weight * z` of a batch, a float32 scalar to differentiate, and its sums, which carry
    no gradient.

    `chunk` is the number of a device's tokens whose logits exist at once; None chooses by `chunk_tokens`. If one chunk
    holds all tokens, or the head has a bias (`HeadTransform`), the logits of all tokens are made at once.
    """
    layout = Layout(current_placement(), chunk or 0, z_weight, model.config.logit_softcap)
    head = Head(output.hidden, output.log_scale, widened(model.head_rows()))
    if model.config.head_epsilon is not None or _chunk(layout, head.rows.shape[0], batch.targets.size) is None:
        sums = cross_entropy(model.logits(output), batch)
        return sums.nats + z_weight * sums.z, jax.lax.stop_gradient(sums)
    objective, sums = _loss(head, batch.targets, batch.weights.astype(jnp.float32), layout)
    return objective, jax.lax.stop_gradient(sums)


def by_token(of: Callable, model: Transformer, output: Output, *others: Shaped[Array, "b T ..."]) -> Any:
    """`of(logits [B, c, V], *others [b, c, ...])`, which returns a tree of arrays [b', c, ...], applied to all T tokens
    in pieces of c and joined. A piece has at most 256 MiB of logits, or one token of each row. Not for training: a
    backward pass would keep all logits."""
    (rows, tokens), vocab = output.hidden.shape[:2], model.head_rows().shape[0]
    count, size = even_parts(tokens, max(1, LOGITS // (rows * vocab)))
    if count == 1:
        return of(model.logits(output), *others)

    def cut(x):
        padded = jnp.pad(x, [(0, 0), (0, count * size - tokens), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(padded.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    def one(part):
        hidden, log_scale, *rest = part
        return of(model.logits(output._replace(hidden=hidden, log_scale=log_scale)), *rest)

    found = jax.lax.map(one, [cut(x) for x in (output.hidden, output.log_scale, *others)])
    joined = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], count * size, *x.shape[3:])[:, :tokens]  # noqa: E731
    return jax.tree.map(joined, found)


def _chunk(layout: Layout, vocab: int, tokens: int) -> int | None:
    """Tokens in a device's chunk, or None if one chunk holds all of them."""
    split = layout.splits("vocab", vocab)
    for axis in layout.row_axes:
        tokens //= layout.shape[axis]
    chunk = layout.chunk or chunk_tokens(tokens, vocab // layout.shape[split] if split else vocab)
    return chunk if chunk < tokens else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss(
    head: Head, targets: Int[Array, "B T"], weights: Float[Array, "B T"], layout: Layout
) -> tuple[Float[Array, ""], Sums]:
    sums, _ = _on_mesh(head, targets, weights, layout, gradient=False)
    return sums.nats + layout.z_weight * sums.z, sums


def _loss_forward(head: Head, targets, weights, layout: Layout):
    sums, gradient = _on_mesh(head, targets, weights, layout, gradient=True)
    return (sums.nats + layout.z_weight * sums.z, sums), jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, head)


def _loss_backward(layout: Layout, gradient: Head, cotangent):
    return jax.tree.map(lambda g: (cotangent[0] * g).astype(g.dtype), gradient), None, None


_loss.defvjp(_loss_forward, _loss_backward)


def _on_mesh(head: Head, targets, weights, layout: Layout, *, gradient: bool) -> tuple[Sums, Head | None]:
    """Runs the chunks on every device of the mesh and sums over the devices."""
    head = head._replace(rows=head.rows.astype(head.hidden.dtype))  # cast first, so that a gather moves this dtype
    vocab, width = head.rows.shape
    chunk = _chunk(layout, vocab, targets.size) or targets.size
    if layout.placement is None:
        return _chunks(head, targets, weights, layout, chunk, gradient)
    mesh: Any = layout.placement.mesh
    rows: Any = layout.placement.rows
    split, features = layout.splits("vocab", vocab), layout.splits("embed", width)
    scattered = features if features in layout.row_axes else None

    def per_device(head: Head, targets, weights):
        sums, found = _chunks(head, targets, weights, layout, chunk, gradient, split)
        if layout.row_axes:
            sums = jax.lax.psum(sums, layout.row_axes)
        if found is not None:
            table = found.rows
            if scattered:
                table = jax.lax.psum_scatter(table, scattered, scatter_dimension=1, tiled=True)
            if others := tuple(axis for axis in layout.row_axes if axis != scattered):
                table = jax.lax.psum(table, others)
            found = found._replace(rows=table)
        return sums, found

    table: Any = P(split, None)
    by_table: Any = P(split, scattered)
    ins = Head(rows, rows, table), rows, rows
    outs = P(), Head(rows, rows, by_table) if gradient else None
    # check_vma=False: shard_map is never transposed, because forward and backward are both written here.
    return jax.shard_map(per_device, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(head, targets, weights)


def _chunks(
    head: Head, targets, weights, layout: Layout, chunk: int, gradient: bool, split: str | None = None
) -> tuple[Sums, Head | None]:
    """Sums over one device's tokens, and the gradient of the objective; the table's gradient is this device's part of
    the sum."""
    shape, tokens = targets.shape, targets.size
    count, size = even_parts(tokens, chunk)  # the last chunk is padded with tokens of weight 0

    def cut(x, *features):
        flat = x.reshape(tokens, *features)
        padded = jnp.pad(flat, [(0, count * size - tokens), *[(0, 0)] * len(features)])
        return padded.reshape(count, size, *features)

    width = head.hidden.shape[-1]
    parts = cut(head.hidden, width), cut(head.log_scale), cut(targets), cut(weights.astype(jnp.float32))

    def one(carry, part):
        total, table = carry
        hidden, log_scale, target, weight = part
        sums, found = _one_chunk(Head(hidden, log_scale, head.rows), target, weight, layout, gradient, split)
        if found is not None:
            table, found = table + found.rows, (found.hidden, found.log_scale)
        return (jax.tree.map(jnp.add, total, sums), table), found

    zeros = Sums(*[jnp.float32(0.0)] * 4), jnp.zeros(head.rows.shape, jnp.float32) if gradient else None
    (sums, table), found = jax.lax.scan(one, zeros, parts)
    if table is None or found is None:
        return sums, None
    hidden, log_scale = (x.reshape(count * size, *x.shape[2:])[:tokens] for x in found)
    return sums, Head(hidden.reshape(*shape, width), log_scale.reshape(shape), table)


def _one_chunk(
    head: Head, targets: Int[Array, " c"], weights: Float[Array, " c"], layout: Layout, gradient: bool, split
) -> tuple[Sums, Head | None]:
    """Sums of `c` tokens, and the objective's gradient by `hidden`, `log_scale` and the rows of the table."""
    rows = head.rows
    product = jnp.einsum("cd,vd->cv", head.hidden, rows, preferred_element_type=jnp.float32)
    factor = jnp.exp(head.log_scale)[:, None]
    logits = softcap(factor * product, layout.cap)
    first = jax.lax.axis_index(split) * rows.shape[0] if split else 0
    ids = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    hit = ids == targets[:, None]
    top, best = jnp.max(logits, axis=-1), first + jnp.argmax(logits, axis=-1).astype(jnp.int32)
    high = jax.lax.pmax(top, split) if split else top
    total, target = jnp.sum(jnp.exp(logits - high[:, None]), axis=-1), jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    if split:
        best = jax.lax.pmin(jnp.where(top == high, best, jnp.iinfo(jnp.int32).max), split)  # the first of equal ids
        total, target = jax.lax.psum((total, target), split)
    log_z = high + jnp.log(total)
    guessed: Bool[Array, " c"] = best == targets
    sums = Sums(*(jnp.sum(weights * x) for x in (log_z - target, log_z**2, jnp.ones_like(log_z), guessed)))
    if not gradient:
        return sums, None
    share = weights * (1.0 + 2.0 * layout.z_weight * log_z)
    by_logit = share[:, None] * jnp.exp(logits - log_z[:, None]) - jnp.where(hit, weights[:, None], 0.0)
    if layout.cap is not None:
        by_logit = by_logit * (1.0 - (logits / layout.cap) ** 2)
    by_scale = jnp.sum(by_logit * factor * product, axis=-1)
    by_product = (factor * by_logit).astype(head.hidden.dtype)
    by_hidden = jnp.einsum("cv,vd->cd", by_product, rows, preferred_element_type=jnp.float32)
    by_rows = jnp.einsum("cv,cd->vd", by_product, head.hidden, preferred_element_type=jnp.float32)
    if split:
        by_hidden, by_scale = jax.lax.psum((by_hidden, by_scale), split)
    return sums, Head(by_hidden.astype(head.hidden.dtype), by_scale, by_rows)
