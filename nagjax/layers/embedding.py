"""The token embedding, with optional learned positions and token types, and the head."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nagjax.layers.int8 import Quantized
from nagjax.layers.parameters import table
from nagjax.layers.softcap import softcap
from nagjax.layers.where import Where


def head_std(width: int) -> float:
    """Standard deviation of the head's rows with which unit-RMS features give logits of standard deviation 1/2."""
    return 0.5 * width**-0.5


class Embedding(nnx.Module):
    """A table [vocab, D], and, if the config asks for them, tables of learned positions and of token types. All start
    normal with standard deviation `std`."""

    def __init__(self, config, std: float, rngs: nnx.Rngs):
        self.tokens = table(rngs, (config.vocab, config.width), std)
        self.positions = (
            table(rngs, (config.context, config.width), std, rows=None) if config.positions == "learned" else None
        )
        types = config.token_types
        self.types = table(rngs, (types, config.width), std, rows=None) if types else None

    @property
    def tables(self) -> int:
        """The number of tables; a token's embedding is the sum of one row of each."""
        return 1 + (self.positions is not None) + (self.types is not None)

    def __call__(
        self, tokens: Int[Array, "B T"], where: Where, dtype, types: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """The embedding [B, T, D] in `dtype`. types: the tokens' types; None: all 0."""
        x = self.tokens[...][tokens]
        if self.positions is not None:
            x = x + self.positions[...][where.positions]
        if self.types is not None:
            x = x + self.types[...][0 if types is None else types]
        return x.astype(dtype)


class Head(nnx.Module):
    """The unembedding table [vocab, D], starts normal with standard deviation `std`."""

    def __init__(self, config, std: float, rngs: nnx.Rngs):
        self.tokens = table(rngs, (config.vocab, config.width), std, role="head")


def unembed(
    hidden: Float[Array, "B T D"],
    log_scale: Float[Array, "B T"],
    rows: Float[Array, "V D"] | Quantized,
    cap: float | None = None,
) -> Float[Array, "B T V"]:
    """Logits `exp(log_scale) * hidden rows^T`, limited by `softcap` if there is a cap. Float32, accumulated from
    factors in hidden's dtype."""
    if isinstance(rows, Quantized):
        logits = rows.product(hidden, 1, jnp.float32)
    else:
        logits = jnp.einsum("btd,vd->btv", hidden, rows.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return softcap(jnp.exp(log_scale)[..., None] * logits, cap)
