"""Compressed convolutional attention (CCA): attention inside a narrow space, whose queries and keys are convolved.

    p = x W_q, x W_k                                                heads of Dh features; H Dh may be far below D
    c[t] = a_0 * p[t-1] + a_1 * p[t] + b                            by feature
    d[t] = B_0 c[t-1] + B_1 c[t] + e                                by head, over its features
    q = d_q + (p_q + p_k) / 2,   k = d_k + (mean of p_q over the key's group + p_k) / 2
    v = x[t] W_v, its first half of features; x[t-1] W_v, the second half
    update = softmax(rotary(q / rms(q)) rotary(beta k / rms(k))^T / sqrt(Dh)) v W_out

Figliolia et al. 2025, arXiv:2510.04476 (with grouped queries: CCGQA). Both convolutions reach one token back; zeros
stand before a document's first token. beta is a learned factor per key head. Initial values, which are ours: a_0 = 0
and a_1 = 1, biases 0, beta 1, B of standard deviation 1 / sqrt(2 Dh).

Numerics: those of `Attention`. A query or a key depends on the tokens right before its own. Therefore the branch runs
for all tokens of a pass in their order (`nagjax.layers.branch.InOrder`), and its cache also holds what the next token
needs from the last one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nagjax.layers.attention import Attention
from nagjax.layers.cache import CachedLayer, KeysValues, KVCache
from nagjax.layers.extra_columns import extra_columns
from nagjax.layers.linear import linears
from nagjax.layers.parameters import Scales, bias
from nagjax.layers.where import Where
from nagjax.parameters import parameter


class CompressedCache(NamedTuple):
    """A `KVCache`, and for every row what its next token needs from its last one."""

    keys: Float[Array, "L B K S Dh"]
    values: Float[Array, "L B K S Dh"]
    last: Float[Array, "L B n"]

    @classmethod
    def empty(
        cls, layers: int, batch: int, slots: int, heads: int, kv_heads: int, head_width: int, dtype
    ) -> "CompressedCache":
        """An empty cache. heads: number of query heads."""
        kept = 2 * (heads + kv_heads) * head_width + kv_heads * head_width // 2
        known = KVCache.empty(layers, batch, slots, kv_heads, head_width, dtype)
        return cls(*known, jnp.zeros((layers, batch, kept), dtype))

    def where(self, layer: Int[Array, ""]) -> Where:
        return KVCache(self.keys, self.values).where(layer)

    def write(
        self, layer: Int[Array, ""], fresh: KeysValues, where: Where, last: Float[Array, "B n"]
    ) -> "CompressedCache":
        known = KVCache(self.keys, self.values).write(layer, fresh, where)
        return CompressedCache(*known, self.last.at[layer].set(last))


class Convolution(nnx.Module):
    """The two convolutions of the query heads or of the key heads."""

    def __init__(self, heads: int, head_width: int, rngs: nnx.Rngs):
        wide, drawn = heads * head_width, jax.random.normal(rngs.params(), (heads, 2 * head_width, head_width))
        taps = jnp.zeros((2, wide), jnp.float32).at[1].set(1.0)
        self.taps = parameter(taps, (None, "heads"), "norm")  # a_0 for the previous token, a_1 for the token itself
        self.taps_bias = bias(wide, "heads")
        self.mix = parameter(drawn * (2 * head_width) ** -0.5, ("heads", "head", None), "matrix")
        self.mix_bias = bias(wide, "heads")

    def by_feature(self, p: Float[Array, "B T n"], before: Float[Array, "B T n"]) -> Float[Array, "B T n"]:
        taps = self.taps[...].astype(p.dtype)
        return taps[0] * before + taps[1] * p + self.taps_bias[...].astype(p.dtype)

    def by_head(self, c: Float[Array, "B T n"], before: Float[Array, "B T n"]) -> Float[Array, "B T n"]:
        heads, both, _ = self.mix.shape
        split = lambda x: x.reshape(*x.shape[:2], heads, both // 2)  # noqa: E731
        joined = jnp.concatenate([split(before), split(c)], axis=-1)
        mixed = jnp.einsum("bthi,hio->btho", joined, self.mix[...].astype(c.dtype))
        return mixed.reshape(c.shape) + self.mix_bias[...].astype(c.dtype)


class Vectors(NamedTuple):
    """Queries, keys and values of the tokens of a pass. last: what each row's next token needs from its last one."""

    queries: Float[Array, "B T H Dh"]
    known: KeysValues
    last: Float[Array, "B n"]


class CompressedAttention(Attention):
    """The branch. `config.heads` times the head width is the width of the narrow space of queries."""

    def __init__(self, config, scales: Scales, rngs: nnx.Rngs):
        super().__init__(config, scales, rngs)
        self.query_convolution = Convolution(config.heads, config.head_width, rngs)
        self.key_convolution = Convolution(config.kv_heads, config.head_width, rngs)
        self.temperature = parameter(jnp.ones((config.kv_heads,), jnp.float32), ("heads",), "norm")

    def in_order(
        self, x: Float[Array, "B T D"], where: Where, cache: CachedLayer | None
    ) -> tuple[Float[Array, "B T D"], CachedLayer | None]:
        """The update of all tokens, and the cache; queries see all that the cache holds. Padding must follow a row's
        tokens."""
        q, known, last = self.vectors(x, where, None if cache is None else cache.stored.last[cache.layer])
        if cache is not None:
            cache = cache.write(known, where, last)
            return self._mixed(q, where, *cache.seen(known, where)), cache
        return self._mixed(q, where, known, where), None

    def vectors(self, x: Float[Array, "B T D"], where: Where, last: Float[Array, "B n"] | None = None) -> Vectors:
        """Queries, keys and values. last: the cache's entry of the token before the first one; None: zeros."""
        maps = (self.query, None), (self.key, None), (self.value, None)
        q, k, v = linears(x, *maps, extra=extra_columns(x))
        now, late = jnp.split(v, 2, axis=-1)
        sizes = [q.shape[-1], k.shape[-1], q.shape[-1], k.shape[-1]]
        begin = None if last is None else jnp.split(last, [sum(sizes[: i + 1]) for i in range(4)], axis=-1)

        def shifted(own: Float[Array, "B T n"], i: int) -> Float[Array, "B T n"]:
            first = jnp.zeros_like(own[:, 0]) if begin is None else begin[i].astype(own.dtype)
            return jnp.concatenate([first[:, None], own[:, :-1]], axis=1)

        inside = (where.positions > 0)[..., None]
        convolved, parts = [], []
        for i, (p, conv) in enumerate(((q, self.query_convolution), (k, self.key_convolution))):
            c = conv.by_feature(p, jnp.where(inside, shifted(p, i), 0.0))
            none = conv.taps_bias[...].astype(p.dtype)  # the first convolution's result for zeros
            convolved.append(conv.by_head(c, jnp.where(inside, shifted(c, 2 + i), none)))
            parts.append((p, c))
        v = jnp.concatenate([now, jnp.where(inside, shifted(late, 4), 0.0)], axis=-1)
        (pq, cq), (pk, ck) = parts
        q, k = self._with_means(*convolved, pq, pk)
        q, k = self._place(q, None, where), self._place(k, None, where)
        k = k * self.temperature[...].astype(k.dtype)[:, None]
        end = jnp.maximum(jnp.sum(where.segments > 0, axis=1), 1) - 1
        rows = jnp.concatenate([pq, pk, cq, ck, late], axis=-1)
        newest = jnp.take_along_axis(rows, end[:, None, None], axis=1)[:, 0]
        if last is not None:  # a row of padding alone keeps its entry
            newest = jnp.where(jnp.any(where.segments > 0, axis=1)[:, None], newest, last.astype(newest.dtype))
        return Vectors(q, KeysValues(k, self._split(v)), newest)

    def queries_keys(
        self, x: Float[Array, "B T D"], where: Where
    ) -> tuple[Float[Array, "B T H Dh"], Float[Array, "B T K Dh"]]:
        found = self.vectors(x, where)
        return found.queries, found.known.keys

    def _with_means(self, q, k, pq, pk) -> tuple[Float[Array, "B T H Dh"], Float[Array, "B T K Dh"]]:
        q, k, pq, pk = (self._split(x) for x in (q, k, pq, pk))
        groups = pq.reshape(*pk.shape[:3], -1, pk.shape[-1])
        shared = 0.5 * (groups + pk[:, :, :, None])
        return q + shared.reshape(q.shape), k + 0.5 * (jnp.mean(groups, axis=3) + pk)
