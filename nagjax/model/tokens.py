"""Checks of a model's inputs."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from nagjax.errors import UserError
from nagjax.layers.cache import KVCache
from nagjax.layers.compressed import CompressedCache
from nagjax.layers.where import Where
from nagjax.model.config import ModelConfig


def checked(
    tokens: Any, config: ModelConfig, where: Where | None, types: Any, places: int | None
) -> tuple[Int[Array, "B T"], Where]:
    """Token ids [B, T] as an array, and their `Where`: without `where` each row is one document. places: the number of
    places per row of the cache that this pass begins, at least T.

    Raises UserError for other shapes, and for ids that are not whole numbers; for more tokens per row than `places` or
    than learned positions; and, unless they are traced, for ids, types or learned positions that the model does not
    have.
    """
    if not isinstance(tokens, jax.Array):
        try:
            tokens = np.asarray(tokens)
        except ValueError:
            raise UserError("tokens", tokens, "give rows of one length, [B, T]") from None
    if tokens.ndim != 2 or not tokens.size:
        raise UserError("tokens", tokens.shape, "give a batch of sequences, [B, T], of at least one token")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UserError("tokens", str(tokens.dtype), "give token ids, whole numbers")
    learned = config.positions == "learned"
    if where is None and learned and tokens.shape[1] > config.context:
        fix = f"the model has {config.context} learned positions: give no longer sequences"
        raise UserError("tokens", tokens.shape, fix)
    if places is not None and tokens.shape[1] > places:
        raise UserError("cache", places, f"give a place for each token of a row, at least {tokens.shape[1]}")
    for i in _ends(tokens):
        config.check_id("tokens", i)
    if types is not None:
        _check_types(types, tokens.shape, config)
    if not isinstance(where, Where | None):
        fix = "give nagjax.layers.where.Where of segments (0: padding) and positions, [B, T] each"
        raise UserError("where", type(where).__name__, fix)
    where = Where.whole(*tokens.shape) if where is None else where.of(tokens.shape)
    for position in _ends(_real_positions(where)) if learned else ():
        if not 0 <= position < config.context:
            raise UserError("where.positions", position, f"the model has learned those from 0 to {config.context - 1}")
    return jnp.asarray(tokens), where


def check_slots(where: Where, cache: tuple | None, begins: bool) -> None:
    """Checks that a cache can hold this pass, unless any of it is traced. Raises UserError for a second document in a
    row, and with `block.cca` for padding in front of a row's tokens. If slots go by position (those of selected tokens
    go by order), also for a position without a slot and, if this pass makes the cache (`begins`), for a row that does
    not begin at position 0: queries would see the unwritten slots before it."""
    if cache is None or not _ends(where.segments) or not _ends(where.positions):
        return
    if (last := _ends(where.segments)[1]) > 1:
        fix = "a row of a cache is one document: give 1 for its tokens, 0 for padding"
        raise UserError("where.segments", last, fix)
    real = np.asarray(where.segments) > 0
    by_position = [own for group in cache for own in group if isinstance(own, KVCache | CompressedCache)]
    if np.any(real[:, 1:] & ~real[:, :-1]) and any(isinstance(own, CompressedCache) for own in by_position):
        fix = "a row of this cache has its padding behind its tokens (block.cca reads the token before)"
        raise UserError("where.segments", np.asarray(where.segments)[:1].tolist(), fix)
    slots = min((n for own in by_position if (n := own.keys.shape[3])), default=0)
    if not slots:
        return
    for position in _ends(_real_positions(where)):
        if not 0 <= position < slots:
            fix = f"the cache holds the positions 0 to {slots - 1}: begin one with a place for each token"
            raise UserError("where.positions", position, fix)
    for position in _first(np.asarray(where.positions), real) if begins else ():
        if position > 0:
            raise UserError("where.positions", int(position), "a row of a cache begins at position 0")


def _real_positions(where: Where) -> np.ndarray:
    """The positions of all tokens but padding; empty if they, or which tokens are padding, are unknown."""
    if not _ends(where.positions) or not _ends(where.segments):
        return np.empty(0, np.int32)
    return np.asarray(where.positions)[np.asarray(where.segments) > 0]


def _first(positions: np.ndarray, real: np.ndarray) -> np.ndarray:
    """The lowest position of each row that has any token."""
    lowest = np.min(positions, axis=1, where=real, initial=np.iinfo(positions.dtype).max)
    return lowest[np.any(real, axis=1)]


def _check_types(types: Any, shape: tuple[int, ...], config: ModelConfig) -> None:
    if not config.token_types:
        raise UserError("types", jnp.shape(types), "the model has no token types: leave them out")
    if jnp.shape(types) != shape:
        raise UserError("types", jnp.shape(types), f"give one for each token, {list(shape)}")
    for i in _ends(types):
        if not 0 <= i < config.token_types:
            raise UserError("types", i, f"the model has the types 0 to {config.token_types - 1}")


def _ends(numbers: Any) -> tuple[int, ...]:
    """The lowest and the highest number. Empty if they are unknown, because the numbers are traced or lie on other
    hosts."""
    if (
        isinstance(numbers, jax.core.Tracer)
        or not np.size(numbers)
        or not getattr(numbers, "is_fully_addressable", True)
    ):
        return ()
    read = np.asarray(numbers)
    return int(read.min()), int(read.max())
