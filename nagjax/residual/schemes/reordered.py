"""OLMo 2's residual: the norm is on a branch's output instead of its input."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nagjax.ranges import Fraction
from nagjax.residual.direct import Direct
from nagjax.residual.norm import rms_norm
from nagjax.residual.prenorm import Gain
from nagjax.residual.protocol import Boundary, SublayerIndex


@dataclasses.dataclass(frozen=True)
class Reordered(Direct):
    """`h <- h + gain_l * f_l(h) / rms(f_l(h))`; the head reads `gain * h / rms(h)`.

    `rms(x) = sqrt(mean(x^2) + epsilon)`. OLMo 2 (2025), arXiv:2501.00656.
    """

    name: ClassVar[str] = "reordered"
    title: ClassVar[str] = "norm on the branches"
    router: ClassVar[str] = "random"
    scale_free: ClassVar[bool] = True

    epsilon: Fraction = 1e-6  # epsilon of the norm

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Gain(width)

    def ends(self, width: int, embedding_std: float, rngs: nnx.Rngs) -> nnx.Module:
        return Gain(width)

    def normalise(self, x: Float[Array, "B T D"], own: Gain) -> Float[Array, "B T D"]:
        return rms_norm(x, own.gain[...], self.epsilon)

    def advance(self, stream, update, at: Boundary):
        normed = self.normalise(update, at.gate).astype(stream.dtype)
        return stream + normed, jnp.ones((1, 1, 1), jnp.float32)

    def close(self, stream, ends):
        return self.normalise(stream, ends), jnp.zeros(stream.shape[:-1], jnp.float32)
