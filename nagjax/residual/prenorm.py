"""The base of the pre-norm schemes: an ordinary residual that branches read through an RMSNorm with a gain."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nagjax.parameters import parameter
from nagjax.residual.norm import rms_norm
from nagjax.residual.protocol import Boundary, Scheme, Stream, split_lanes
from pallas_kernels import add_rms_norm


class PreNormStream(NamedTuple):
    """The residual, and its normalised copy for the next reader."""

    hidden: Float[Array, "B T D"]
    normed: Float[Array, "B T D"]


class Gain(nnx.Module):
    """Per-feature gain of one RMSNorm, starts at 1."""

    def __init__(self, width: int):
        self.gain = parameter(jnp.ones((width,), jnp.float32), ("embed",), "norm")


@dataclasses.dataclass(frozen=True)
class PreNorm(Scheme):
    """`x_l = scale_l * gain_l * h / rms(h)`; `h <- h + f_l(x_l)`. The head reads the residual through a last norm,
    without a scale.

    `rms(h) = sqrt(mean(h^2) + epsilon)`.
    """

    epsilon: ClassVar[float] = 1e-6

    def entry(self, width: int, rngs: nnx.Rngs) -> nnx.Module:
        return Gain(width)

    def read_scale(self, reader: Int[Array, ""]) -> Float[Array, ""]:
        """Factor on the norm's output for this reader: a sublayer's 1-based number, or 0 for the head."""
        return jnp.float32(1.0)

    def open(self, embedding, at: Boundary, ends) -> PreNormStream:
        return PreNormStream(embedding, self.normalise(embedding, at))

    def read(self, stream: Stream) -> Float[Array, "B T D"]:
        return stream.normed

    def normalise(self, hidden: Float[Array, "B T D"], at: Boundary) -> Float[Array, "B T D"]:
        return rms_norm(hidden, self.read_scale(at.following) * at.entry.gain[...], self.epsilon)

    def advance(self, stream: PreNormStream, update, at: Boundary):
        update, gain = update.astype(stream.hidden.dtype), at.entry.gain[...].astype(jnp.float32)
        hidden, normed = add_rms_norm(stream.hidden, update, gain, self.read_scale(at.following), epsilon=self.epsilon)
        return PreNormStream(hidden, normed), jnp.ones((1, 1, 1), jnp.float32)

    def skip(self, stream: PreNormStream, at: Boundary) -> PreNormStream:
        return PreNormStream(stream.hidden, self.normalise(stream.hidden, at))

    def close(self, stream: Stream, ends):
        return stream.normed, jnp.zeros(stream.normed.shape[:-1], jnp.float32)

    def lanes(self, stream: PreNormStream):
        return split_lanes(stream.hidden)
