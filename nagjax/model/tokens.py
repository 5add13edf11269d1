"""What a model is given to read, checked."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from nagjax.errors import UserError
from nagjax.model.config import ModelConfig


def checked(tokens: Any, config: ModelConfig, whole: bool, places: int | None) -> Int[Array, "B T"]:
    """Token ids [B, T] as an array. whole: each row is a document; places: of the cache that they begin.

    Raises UserError for another shape, for what are no whole numbers, for rows of more than the places or, if they are
    whole, the learned positions, and, unless they are traced, for ids that the vocabulary does not have."""
    if not isinstance(tokens, jax.Array):
        try:
            tokens = np.asarray(tokens)
        except ValueError:
            raise UserError("tokens", tokens, "give rows of one length, [B, T]") from None
    if tokens.ndim != 2:
        raise UserError("tokens", tokens.shape, "give a batch of sequences, [B, T]")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UserError("tokens", str(tokens.dtype), "give token ids, whole numbers")
    if whole and config.positions == "learned" and tokens.shape[1] > config.context:
        fix = f"the model has {config.context} learned positions: give no longer sequences"
        raise UserError("tokens", tokens.shape, fix)
    if places is not None and tokens.shape[1] > places:
        raise UserError("cache", places, f"give a place for each token of a row, at least {tokens.shape[1]}")
    if not isinstance(tokens, jax.core.Tracer) and tokens.size and getattr(tokens, "is_fully_addressable", True):
        read = np.asarray(tokens)
        for i in (int(read.min()), int(read.max())):
            config.check_id("tokens", i)
    return jnp.asarray(tokens)
