"""The base of the schemes whose stream is the residual alone and whose branches read the residual as it is."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from nagjax.residual.protocol import Boundary, Scheme, split_lanes


@dataclasses.dataclass(frozen=True)
class Direct(Scheme):
    """`x_l = h`, and the head reads h, unless a scheme overrides this. A scheme that inherits from this class defines
    `advance`."""

    def open(self, embedding, at: Boundary, ends) -> Float[Array, "B T D"]:
        return embedding

    def read(self, stream: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return stream

    def close(self, stream: Float[Array, "B T D"], ends) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
        return stream, jnp.zeros(stream.shape[:-1], jnp.float32)

    def lanes(self, stream: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
        return split_lanes(stream)
