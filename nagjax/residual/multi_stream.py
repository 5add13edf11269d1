"""The base of the schemes with n residual streams: a branch reads one mix of them and writes to all of them."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nagjax.ranges import Count
from nagjax.residual.protocol import Boundary, split_lanes
from nagjax.residual.schemes.plain import Plain


class Streams(NamedTuple):
    """The n residual streams, and the normalised mix for the next reader."""

    hidden: Float[Array, "B T N D"]
    normed: Float[Array, "B T D"]


@dataclasses.dataclass(frozen=True)
class MultiStream(Plain):
    """`x_l = RMSNorm_l(sum_i p_i H_i)`; `H_j <- sum_i R_ij H_i + q_j f_l(x_l)`. The streams start as copies of the
    embedding. Telemetry measures their mean, which has the length of an ordinary residual.

    p belongs to the reader and is computed from the streams it reads. R and q belong to the sublayer that commits its
    update and are computed from the streams before it.
    """

    streams: Count = 4  # number of parallel residual streams (n)

    def read_weights(self, hidden: Float[Array, "B T N D"], at: Boundary) -> Float[Array, "B T N"]:
        """p of the next reader, float32."""
        raise NotImplementedError

    def write_weights(
        self, hidden: Float[Array, "B T N D"], at: Boundary
    ) -> tuple[Float[Array, "B T N N"], Float[Array, "B T N"]]:
        """R [from, to] and q of the sublayer that commits its update, float32."""
        raise NotImplementedError

    def ready(self, hidden: Float[Array, "B T N D"], at: Boundary) -> Streams:
        weights = self.read_weights(hidden, at)[..., None]
        read = mixed(weights, hidden)[..., 0, :].astype(hidden.dtype)
        return Streams(hidden, self.normalise(read, at))

    def open(self, embedding, at: Boundary, ends) -> Streams:
        copies = jnp.broadcast_to(embedding[..., None, :], (*embedding.shape[:2], self.streams, embedding.shape[-1]))
        return self.ready(copies, at)

    def advance(self, stream: Streams, update, at: Boundary):
        mixing, writing = self.write_weights(stream.hidden, at)
        hidden = mixed(mixing, stream.hidden) + writing[..., None] * update[..., None, :].astype(jnp.float32)
        gate = jnp.mean(writing, axis=-1, keepdims=True)
        return self.ready(hidden.astype(stream.hidden.dtype), at), gate

    def skip(self, stream: Streams, at: Boundary) -> Streams:
        return self.ready(stream.hidden, at)

    def lanes(self, stream: Streams):
        return split_lanes(jnp.mean(stream.hidden.astype(jnp.float32), axis=-2))


def mixed(weights: Float[Array, "B T N M"], hidden: Float[Array, "B T N D"]) -> Float[Array, "B T M D"]:
    """`sum_i weights_im hidden_i`, float32. It is a sum instead of a matrix product because each token has its own
    small matrix (4 x 4), and the compiler fuses a sum with its neighbours."""
    return jnp.sum(weights[..., None] * hidden.astype(jnp.float32)[..., None, :], axis=-3)


def unit(x: Float[Array, "..."], axes: int | tuple[int, ...], epsilon: float) -> Float[Array, "..."]:
    """RMSNorm over the axes, without a gain, in x's dtype."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=axes, keepdims=True) + epsilon)).astype(x.dtype)
