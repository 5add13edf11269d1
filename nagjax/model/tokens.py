"""What a model is given to read, checked."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from nagjax.errors import UserError
from nagjax.model.config import ModelConfig


def checked(tokens: Any, config: ModelConfig, longest: int | None = None) -> Int[Array, "B T"]:
    """Token ids [B, T] as an array. Raises UserError for another shape, for what are no whole numbers, for rows of more
    than `longest`, and, unless they are traced, for ids that the vocabulary does not have."""
    if not isinstance(tokens, jax.Array):
        try:
            tokens = np.asarray(tokens)
        except ValueError:
            raise UserError("tokens", tokens, "give rows of one length, [B, T]") from None
    if tokens.ndim != 2:
        raise UserError("tokens", tokens.shape, "give a batch of sequences, [B, T]")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UserError("tokens", str(tokens.dtype), "give token ids, whole numbers")
    if longest is not None and tokens.shape[1] > longest:
        raise UserError("tokens", tokens.shape, f"the model has {longest} learned positions: give no longer sequences")
    if not isinstance(tokens, jax.core.Tracer) and tokens.size and getattr(tokens, "is_fully_addressable", True):
        read = np.asarray(tokens)
        for i in (int(read.min()), int(read.max())):
            config.check_id("tokens", i)
    return jnp.asarray(tokens)
