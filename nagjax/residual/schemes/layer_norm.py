"""Pre-norm with LayerNorm, its gain and bias: GPT-2's residual."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx

from nagjax.parameters import parameter
from nagjax.ranges import Fraction
from nagjax.residual.norm import layer_norm
from nagjax.residual.prenorm import PreNorm, PreNormStream
from nagjax.residual.protocol import Boundary, SublayerIndex


class Affine(nnx.Module):
    """Gain and bias of one LayerNorm. The gain starts at 1, the bias at 0."""

    def __init__(self, width: int):
        self.gain = parameter(jnp.ones((width,), jnp.float32), ("embed",), "norm")
        self.bias = parameter(jnp.zeros((width,), jnp.float32), ("embed",), "norm")


@dataclasses.dataclass(frozen=True)
class LayerNorm(PreNorm):
    """`h <- h + f_l(LN_l(h))`, `LN(h) = gain (h - mean(h)) / sqrt(var(h) + epsilon) + bias`.

    LayerNorm: Ba, Kiros & Hinton 2016, arXiv:1607.06450. In pre-norm position: GPT-2 (Radford et al. 2019). Mean and
    variance are computed in float32.
    """

    name: ClassVar[str] = "layer_norm"
    title: ClassVar[str] = "LayerNorm"

    epsilon: Fraction = 1e-5  # epsilon of the norm
    scaled_start: bool = True  # divide initial output projections by sqrt(number of sublayers), as in plain

    def output_scale(self, sublayer: SublayerIndex) -> float:
        return sublayer.sublayers**-0.5 if self.scaled_start else 1.0

    def entry(self, width: int, rngs: nnx.Rngs) -> nnx.Module:
        return Affine(width)

    def normalise(self, hidden, at: Boundary):
        return layer_norm(hidden, at.entry.gain[...], at.entry.bias[...], self.epsilon)

    def advance(self, stream: PreNormStream, update, at: Boundary):
        hidden = stream.hidden + update.astype(stream.hidden.dtype)
        return PreNormStream(hidden, self.normalise(hidden, at)), jnp.ones((1, 1, 1), jnp.float32)
