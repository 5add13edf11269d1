"""Where each token stands, and which others it may see."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Window = int | Int[Array, ""] | None  # tokens that a query sees, counting back from its own; None: all


class Where(NamedTuple):
    """Which document each token belongs to (1, 2, ...; 0 is padding) and its position in it. The tokens of a document
    stand in a row in the order of their positions."""

    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]

    @classmethod
    def whole(cls, batch: int, tokens: int) -> "Where":
        """One document per row."""
        positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
        return cls(jnp.ones((batch, tokens), jnp.int32), positions)


def causal_mask_by_key(queries: Where, keys: Where, window: Window = None) -> Bool[Array, "B 1 Tk Tq"]:
    """`causal_mask` with its last two axes swapped, in memory too."""
    same = queries.segments[:, None, :] == keys.segments[:, :, None]
    behind = queries.positions[:, None, :] - keys.positions[:, :, None]
    near = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return (same & near)[:, None]


def causal_mask(queries: Where, keys: Where, window: Window = None) -> Bool[Array, "B 1 Tq Tk"]:
    """True where the key is in the query's document, not after the query, and less than `window` tokens before it.
    Padding sees padding, so that no row is empty."""
    same = queries.segments[:, :, None] == keys.segments[:, None, :]
    behind = queries.positions[:, :, None] - keys.positions[:, None, :]
    near = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return (same & near)[:, None]


def seen_mask(queries: Where, keys: Where, window: Window = None, causal: bool = True) -> Bool[Array, "B 1 Tq Tk"]:
    """`causal_mask`; or, without `causal`, True where the key is in the query's document, which may come after it."""
    if causal:
        return causal_mask(queries, keys, window)
    return (queries.segments[:, :, None] == keys.segments[:, None, :])[:, None]
