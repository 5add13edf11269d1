"""The attention branch: grouped-query, causal within a document, with an optional key/value cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nagjax.layers.attend import attend
from nagjax.layers.parameters import matrix
from nagjax.layers.rotary import rotary
from nagjax.layers.where import Where


class KVCache(NamedTuple):
    """Keys and values by position. Slots at positions not yet reached are masked, whatever they hold."""

    keys: Float[Array, "B S K Dh"]
    values: Float[Array, "B S K Dh"]

    @property
    def where(self) -> Where:
        """Of the slots."""
        return Where.whole(*self.keys.shape[:2])

    def write(self, fresh: "KVCache", where: Where) -> "KVCache":
        rows = jnp.arange(where.positions.shape[0])[:, None]
        return jax.tree.map(lambda old, new: old.at[rows, where.positions].set(new), self, fresh)


def unit_rms(x: Float[Array, "*n Dh"]) -> Float[Array, "*n Dh"]:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention without biases; RoPE; optional QK-norm without gain (Henry et al. 2020)."""

    def __init__(self, config, output_scale: float, rngs: nnx.Rngs):
        self.config = config
        wide, narrow = config.heads * config.head_width, config.kv_heads * config.head_width
        self.query = matrix(rngs, (config.width, wide), ("embed", "heads"))
        self.key = matrix(rngs, (config.width, narrow), ("embed", "heads"))
        self.value = matrix(rngs, (config.width, narrow), ("embed", "heads"))
        self.out = matrix(rngs, (wide, config.width), ("heads", "embed"), output_scale)

    def _heads(self, x: Float[Array, "B T D"], weight: nnx.Param) -> Float[Array, "B T H Dh"]:
        return (x @ weight[...].astype(x.dtype)).reshape(*x.shape[:2], -1, self.config.head_width)

    def _place(self, x: Float[Array, "B T H Dh"], where: Where) -> Float[Array, "B T H Dh"]:
        x = unit_rms(x) if self.config.qk_norm else x
        return rotary(x, where.positions, self.config.rope_base) if self.config.positions == "rotary" else x

    def queries(self, x: Float[Array, "B T D"], where: Where) -> Float[Array, "B T H Dh"]:
        return self._place(self._heads(x, self.query), where)

    def keys_values(self, x: Float[Array, "B T D"], where: Where) -> KVCache:
        return KVCache(self._place(self._heads(x, self.key), where), self._heads(x, self.value))

    def mix(
        self, x: Float[Array, "B k D"], where: Where, known: KVCache, seen: Where, implementation: str | None = None
    ) -> Float[Array, "B k D"]:
        """The update of the tokens `x`, which stand at `where`, from keys and values that stand at `seen`."""
        mixed = attend(
            self.queries(x, where), known.keys, known.values, where, seen, implementation or self.config.attention
        )
        return mixed.reshape(*x.shape[:2], -1) @ self.out[...].astype(x.dtype)

    def __call__(
        self, x: Float[Array, "B T D"], where: Where, cache: KVCache | None = None
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """With a cache, the new keys and values are written at their positions and the queries see all of it."""
        fresh = self.keys_values(x, where)
        if cache is None:
            return self.mix(x, where, fresh, where), None
        cache = cache.write(fresh, where)
        return self.mix(x, where, cache, cache.where, "xla"), cache
