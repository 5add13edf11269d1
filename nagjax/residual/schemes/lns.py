"""LayerNorm Scaling."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nagjax.residual.prenorm import PreNorm


@dataclasses.dataclass(frozen=True)
class LNS(PreNorm):
    """`x = RMSNorm(h) / sqrt(b)` for both sublayers of block b = 1, 2, ...; the final norm is not scaled.

    Sun et al. 2025, "The Curse of Depth in Large Language Models", arXiv:2502.05795. The factor multiplies the norm's
    output, after the norm's gain. It replaces a depth-scaled initialisation; the paper's Table 6 does not combine the
    two.
    """

    name: ClassVar[str] = "lns"
    title: ClassVar[str] = "LayerNorm Scaling"
    learning_rate: ClassVar[float] = 1.6e-2

    def read_scale(self, reader: Int[Array, ""]) -> Float[Array, ""]:
        block = (reader + 1) // 2
        return jnp.where(reader == 0, 1.0, 1.0 / jnp.sqrt(jnp.maximum(block, 1).astype(jnp.float32)))
