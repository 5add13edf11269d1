"""Where each token stands, and which others it may see."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Where(NamedTuple):
    """Which document each token belongs to (1, 2, ...; 0 is padding) and its position in it."""

    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]

    @classmethod
    def whole(cls, batch: int, tokens: int) -> "Where":
        """One document per row."""
        positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
        return cls(jnp.ones((batch, tokens), jnp.int32), positions)


def causal_mask(queries: Where, keys: Where) -> Bool[Array, "B 1 Tq Tk"]:
    """True where the key is of the query's document and not after it. Padding sees padding: no row is empty."""
    same = queries.segments[:, :, None] == keys.segments[:, None, :]
    before = queries.positions[:, :, None] >= keys.positions[:, None, :]
    return (same & before)[:, None]
