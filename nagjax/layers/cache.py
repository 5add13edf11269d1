"""The cache of the keys and values of past tokens, for attention one token at a time.

The keys of all layers of a group are one array with heads before tokens, and so are the values: a pass writes into it
in place, layer by layer, and attention reads a head's keys in the order in which they lie in memory. (A cache that is
an input and an output of the scan over depth would be copied for each token; with tokens before heads it would be
transposed for each token.)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nagjax.layers.cpu import by_head
from nagjax.layers.platform import on_one_cpu
from nagjax.layers.softcap import softcap
from nagjax.layers.where import Where, Window, seen_mask

MASKED = -1e30


class KeysValues(NamedTuple):
    """Keys and values of tokens, in the order of the tokens."""

    keys: Float[Array, "B S K Dh"]
    values: Float[Array, "B S K Dh"]


class KVCache(NamedTuple):
    """Keys and values by position: each row holds one document, from its first token on. Slots after a query's position
    are masked, whatever they hold."""

    keys: Float[Array, "L B K S Dh"]
    values: Float[Array, "L B K S Dh"]

    @classmethod
    def empty(cls, layers: int, batch: int, slots: int, heads: int, head_width: int, dtype) -> "KVCache":
        return cls(*jnp.zeros((2, layers, batch, heads, slots, head_width), dtype))

    def where(self, layer: Int[Array, ""]) -> Where:
        return Where.whole(self.keys.shape[1], self.keys.shape[3])

    def write(self, layer: Int[Array, ""], fresh: KeysValues, where: Where) -> "KVCache":
        rows = jnp.arange(where.positions.shape[0])[:, None]
        slots = jnp.where(where.segments > 0, where.positions, self.keys.shape[3])  # padding: out of range
        put = lambda old, new: old.at[layer, rows, :, slots].set(new, mode="drop")  # noqa: E731
        return KVCache(*jax.tree.map(put, tuple(self), tuple(fresh)))


class Fresh(KeysValues):
    """The keys and values of the pass that began a cache. They are all that the cache holds, so attention need not read
    them from there."""


class CachedLayer(NamedTuple):
    """One layer of a cache: of a `KVCache` or an object with the same `keys`, `values`, `where` and `write`. `rows`:
    the cache's rows to which the queries belong; None: all. `begins`: whether this pass made the cache (one from
    `empty_cache` counts as filled)."""

    stored: Any
    layer: Int[Array, ""]
    rows: Int[Array, " n"] | None = None
    begins: bool = False

    @property
    def where(self) -> Where:
        """The documents and positions of the keys and values."""
        whole = self.stored.where(self.layer)
        return whole if self.rows is None else jax.tree.map(lambda x: x[self.rows], whole)

    def write(self, *fresh) -> "CachedLayer":
        return self._replace(stored=self.stored.write(self.layer, *fresh))

    def seen(self, fresh: KeysValues, where: Where) -> tuple[Any, Where]:
        """What the queries of a pass that has written `fresh` attend to, and its documents and positions."""
        return (Fresh(*fresh), where) if self.begins else (self, self.where)

    def of(self, rows: Int[Array, " n"]) -> "CachedLayer":
        return self._replace(rows=rows)


def attend_cached(
    q: Float[Array, "B Tq H Dh"], known: CachedLayer, q_where: Where, window: Window = None, cap: float | None = None
) -> Float[Array, "B Tq H Dh"]:
    """`attend` to a layer of a cache, causal. On one CPU, a pass of one token per row is computed row by row; rows of
    padding are left out and get zeros."""
    batch, tokens, heads, head_width = q.shape
    grouped = q.reshape(batch, tokens, known.stored.keys.shape[2], -1, head_width)
    if tokens == 1 and on_one_cpu():
        return _row_by_row(grouped[:, 0], known, q_where, window, cap).reshape(q.shape)
    keys, values = (x[known.layer] for x in (known.stored.keys, known.stored.values))
    if known.rows is not None:
        keys, values = keys[known.rows], values[known.rows]
    return _mixed(grouped, keys, values, seen_mask(q_where, known.where, window), cap).reshape(q.shape)


def _mixed(
    q: Float[Array, "B T K G Dh"],
    keys: Float[Array, "B K S Dh"],
    values: Float[Array, "B K S Dh"],
    mask: Bool[Array, "B 1 T S"],
    cap: float | None,
) -> Float[Array, "B T K G Dh"]:
    """Attention with softmax in float32. The queries of all heads that share a key are rows of one matmul: XLA:CPU has
    a library for that, but computes `btkgd,bksd->bkgts` element by element, which takes thirty times as long in
    bfloat16."""
    batch, tokens, heads, shared, width = q.shape
    rows = q.transpose(0, 2, 3, 1, 4).reshape(batch, heads, shared * tokens, width)
    scores = by_head(rows, keys, ((3,), (3,)), jnp.float32) * width**-0.5
    shares = jax.nn.softmax(jnp.where(jnp.tile(mask, (1, 1, shared, 1)), softcap(scores, cap), MASKED), axis=-1)
    mixed = by_head(shares.astype(values.dtype), values, ((3,), (2,)), values.dtype)
    return mixed.reshape(batch, heads, shared, tokens, width).transpose(0, 3, 1, 2, 4)


def _row_by_row(
    q: Float[Array, "B K G Dh"], known: CachedLayer, where: Where, window: Window, cap: float | None
) -> Array:
    where, seen = jax.tree.map(jnp.asarray, where), known.where
    live = where.segments[:, 0] > 0
    order = jnp.argsort(~live, stable=True)
    places = jnp.arange(q.shape[0]) if known.rows is None else known.rows

    def one(i, done):
        row, sizes = order[i], (1, 1, *known.stored.keys.shape[2:])
        at = (known.layer, places[row], 0, 0, 0)
        keys, values = (jax.lax.dynamic_slice(x, at, sizes)[0] for x in (known.stored.keys, known.stored.values))
        here, there = (jax.tree.map(lambda x: x[row][None], own) for own in (where, seen))
        return done.at[row].set(_mixed(q[row][None, None], keys, values, seen_mask(here, there, window), cap)[0, 0])

    return jax.lax.fori_loop(0, jnp.sum(live), one, jnp.zeros_like(q))
