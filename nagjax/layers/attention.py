"""The attention branch: grouped-query attention within a document, causal or not, with an optional key/value cache."""

import copy
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nagjax.layers import cpu
from nagjax.layers.attend import attend
from nagjax.layers.branch import update_of
from nagjax.layers.cache import CachedLayer, Fresh, KeysValues, attend_cached
from nagjax.layers.extra_columns import extra_columns
from nagjax.layers.linear import linear, linears, linears_then
from nagjax.layers.parameters import Scales, bias, gain, matrix
from nagjax.layers.platform import on_gpu, on_one_cpu
from nagjax.layers.rotary import turned, turns
from nagjax.layers.where import Where, Window, seen_mask

ALL = 2**30  # tokens: more than any context


def unit_rms(x: Float[Array, "*n Dh"], epsilon: float = 1e-6) -> Float[Array, "*n Dh"]:
    """x divided by its root mean square over the last axis: computed in float32, returned in the dtype of x."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    scale = cpu.once(scale) if on_gpu() else scale  # XLA:GPU would write float32 rows between norm and rotation
    return (wide * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with RoPE and optional QK-norm (Henry et al. 2020). `config.block` may add biases and
    gains."""

    def __init__(self, config, scales: Scales, rngs: nnx.Rngs):
        self.config = config
        wide, narrow = config.heads * config.head_width, config.kv_heads * config.head_width
        self.query = matrix(rngs, (config.width, wide), ("embed", "heads"))
        self.key = matrix(rngs, (config.width, narrow), ("embed", "heads"))
        self.value = matrix(rngs, (config.width, narrow), ("embed", "heads"), scales.inner)
        self.out = matrix(rngs, (wide, config.width), ("heads", "embed"), scales.output)
        biases = config.block.biases
        self.query_bias = bias(wide, "heads") if "qkv" in biases else None
        self.key_bias = bias(narrow, "heads") if "qkv" in biases else None
        self.value_bias = bias(narrow, "heads") if "qkv" in biases else None
        self.out_bias = bias(config.width, "embed") if "out" in biases else None
        own = lambda row: {"head": gain(config.head_width, None), "row": gain(row, "heads")}  # noqa: E731
        self.query_gain = own(wide).get(config.block.qk_gain)
        self.key_gain = own(narrow).get(config.block.qk_gain)
        self.other = nnx.data(None)

    def of_block(self, place: Int[Array, ""]) -> "Attention":
        """The attention of the block at this 0-based place (before pruning), which may be one of `block.others`."""
        if not self.config.block.others.places:
            return self
        changed = copy.copy(self)
        vars(changed)["other"] = jnp.isin(place, jnp.asarray(self.config.block.others.places, jnp.int32))
        return changed

    @property
    def window(self) -> Window:
        """The number of tokens that a query of this block sees, counting back from its own; None: all."""
        own, other = self.config.block.window, self.config.block.others.window
        if self.other is None or own == other:
            return own
        return jnp.where(self.other, ALL if other is None else other, ALL if own is None else own)

    def _turns(self, where: Where) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
        config, others, half = self.config, self.config.block.others, self.config.rotated_width // 2
        found = turns(where.positions, half, config.rope_base, config.block.rope)
        if self.other is None or others.rotary == "same":
            return found
        own = jnp.float32(1.0), jnp.float32(0.0)
        if others.rotary == "own":
            own = turns(where.positions, half, others.rope_base, others.rope)
        return jnp.where(self.other, own[0], found[0]), jnp.where(self.other, own[1], found[1])

    def _heads(self, x: Float[Array, "B T D"], weight: nnx.Param, added: nnx.Param | None) -> Float[Array, "B T H Dh"]:
        return self._split(linear(x, weight, added))

    def _split(self, x: Float[Array, "B T n"]) -> Float[Array, "B T H Dh"]:
        return x.reshape(*x.shape[:2], -1, self.config.head_width)

    def _place(self, x: Float[Array, "B T H Dh"], gain: nnx.Param | None, where: Where) -> Float[Array, "B T H Dh"]:
        config, block = self.config, self.config.block
        if config.qk_norm:
            vectors = x.reshape(*x.shape[:2], -1) if block.qk_gain == "row" else x
            vectors = unit_rms(vectors, block.qk_epsilon)
            vectors = vectors if gain is None else vectors * gain[...].astype(x.dtype)
            x = vectors.reshape(x.shape)
        if config.positions != "rotary":
            return x
        return turned(x, *self._turns(where))

    def queries(self, x: Float[Array, "B T D"], where: Where) -> Float[Array, "B T H Dh"]:
        return self._place(self._heads(x, self.query, self.query_bias), self.query_gain, where)

    def keys_values(self, x: Float[Array, "B T D"], where: Where) -> KeysValues:
        keys = self._place(self._heads(x, self.key, self.key_bias), self.key_gain, where)
        return KeysValues(keys, self._heads(x, self.value, self.value_bias))

    def queries_keys(
        self, x: Float[Array, "B T D"], where: Where
    ) -> tuple[Float[Array, "B T H Dh"], Float[Array, "B T K Dh"]]:
        """The queries and keys of all tokens, from which attention's weights are computed."""
        return self.queries(x, where), self.keys_values(x, where).keys

    def mix(
        self, x: Float[Array, "B k D"], where: Where, known: KeysValues | CachedLayer, seen: Where
    ) -> Float[Array, "B k D"]:
        """The update of the tokens `x`, which stand at `where`, from the keys and values `known`, which stand at
        `seen`."""
        return self._mixed(self.queries(x, where), where, known, seen)

    def _mixed(
        self, q: Float[Array, "B k H Dh"], where: Where, known: KeysValues | CachedLayer, seen: Where
    ) -> Float[Array, "B k D"]:
        config, cap = self.config, self.config.block.softcap
        gaps = config.mod.kv == "selected"
        if isinstance(known, CachedLayer):
            mixed = attend_cached(q, known, where, self.window, cap)
        elif self._at_once and not gaps:  # with gaps, some queries see no key
            heads_first = (rows.swapaxes(1, 2) for rows in (q * q.shape[-1] ** -0.5, *known))
            return self._mixed_at_once(*heads_first, where, seen, bounded=False)
        else:
            # The implementation chosen for training may not take prompts of every length, or not run on this device.
            own = "auto" if isinstance(known, Fresh) and config.attention != "xla" else config.attention
            options = own, self.window, cap, config.causal, gaps
            mixed = attend(q, known.keys, known.values, where, seen, *options)
        return linear(mixed.reshape(*q.shape[:2], -1), self.out, self.out_bias)

    def between(
        self, x: Float[Array, "B k D"], where: Where, source: Float[Array, "B S D"], seen: Where
    ) -> Float[Array, "B k D"]:
        """The update of the tokens `x`, which stand at `where`, from the tokens `source`, which stand at `seen`."""
        config, here = self.config, on_one_cpu()
        qkv = (self.query, self.query_bias), (self.key, self.key_bias), (self.value, self.value_bias)
        if source is x and not here:
            q, *known = linears_then(functools.partial(self._placed, where), x, *qkv, extra=extra_columns(x))
            return self._mixed(q, where, KeysValues(*known), seen)
        if not self._at_once:
            return self.mix(x, where, self.keys_values(source, seen), seen)
        if source is x:
            q, k, v = linears(x, *qkv, extra=extra_columns(x))
        else:
            q, k, v = *linears(x, qkv[0]), *linears(source, *qkv[1:])
        bounded, scale = self._unit and cpu.is_bounded(config.head_width), config.head_width**-0.5
        q = self._heads_first(q, self.query_gain, where, scale)
        k = self._heads_first(k, self.key_gain, seen, 1.0)
        v = self._split(v).swapaxes(1, 2)
        return self._mixed_at_once(q, k, v, where, seen, bounded)

    @property
    def _at_once(self) -> bool:
        """Whether `nagjax.layers.cpu` can compute this attention."""
        return on_one_cpu() and self.config.attention == "auto" and self.config.block.softcap is None

    def _mixed_at_once(
        self,
        q: Float[Array, "B H k Dh"],
        k: Float[Array, "B K S Dh"],
        v: Float[Array, "B K S Dh"],
        where: Where,
        seen: Where,
        bounded: bool,
    ) -> Float[Array, "B k D"]:
        """`_mixed` by `cpu.attention`; see there for `bounded`."""
        causal = self.config.causal
        spans = cpu.spans_of(q.shape[2]) if causal and q.shape[2] == k.shape[2] else 1
        mask, by_key = (seen_mask(where, seen, self.window, causal, by_key) for by_key in (False, True))
        mixed = cpu.attention(q, k, v, mask, by_key, bounded, spans)
        return linear(mixed, self.out, self.out_bias)

    def _placed(self, where: Where, *parts: Float[Array, "B T _"]) -> tuple[Float[Array, "B T _ Dh"], ...]:
        q, k, v = map(self._split, parts)
        return self._place(q, self.query_gain, where), self._place(k, self.key_gain, where), v

    @property
    def _unit(self) -> bool:
        """Whether queries and keys have unit RMS."""
        block = self.config.block
        return (
            self.config.qk_norm and block.qk_gain == "none" and block.rope.attention == block.others.rope.attention == 1
        )

    def _heads_first(
        self, x: Float[Array, "B T n"], gain: nnx.Param | None, where: Where, scale: float
    ) -> Float[Array, "B H T Dh"]:
        x, config, block = self._split(x), self.config, self.config.block
        if self._unit and config.positions == "rotary" and config.rotated_width == config.head_width:
            return cpu.placed(x, *self._turns(where), block.qk_epsilon, scale)
        return scale * self._place(x, gain, where).swapaxes(1, 2)

    def __call__(
        self, x: Float[Array, "B T D"], where: Where, cache: CachedLayer | None = None
    ) -> tuple[Float[Array, "B T D"], CachedLayer | None]:
        """The update of all tokens, and the cache. With a cache, new keys and values are written into it, and queries
        see all that it holds."""
        return update_of(self, x, where, cache)
