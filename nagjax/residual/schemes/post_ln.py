"""Post-LN: the norm after the addition, as in the original Transformer."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nagjax.residual.direct import Direct
from nagjax.residual.norm import rms_norm
from nagjax.residual.prenorm import Gain
from nagjax.residual.protocol import Boundary, SublayerIndex


@dataclasses.dataclass(frozen=True)
class PostLN(Direct):
    """`h <- gain_l * unit(h + f_l(h))`, `unit(x) = x / sqrt(mean(x^2) + epsilon)`. Vaswani et al. 2017,
    arXiv:1706.03762, with RMSNorm in place of LayerNorm.

    The first branch reads the embedding and the head reads the last state, both without a further norm. Initial values
    are ordinary.
    """

    name: ClassVar[str] = "post_ln"
    title: ClassVar[str] = "Post-LN"
    epsilon: ClassVar[float] = 1e-6

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Gain(width)

    def kept(self, at: Boundary) -> Float[Array, ""] | float:
        """Factor on the old state in the sum."""
        return 1.0

    def normalise(self, x: Float[Array, "B T D"], own) -> Float[Array, "B T D"]:
        return rms_norm(x, own.gain[...], self.epsilon)

    def advance(self, stream, update, at: Boundary):
        total = self.kept(at) * stream.astype(jnp.float32) + update.astype(jnp.float32)
        return self.normalise(total, at.gate).astype(stream.dtype), jnp.ones((1, 1, 1), jnp.float32)
