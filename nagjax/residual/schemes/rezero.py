"""ReZero: no norm; every update has a learned factor that starts at zero."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nagjax.residual.protocol import Boundary, Scheme, SublayerIndex, split_lanes
from nagjax.residual.schemes.skip_init import Scalar


@dataclasses.dataclass(frozen=True)
class ReZero(Scheme):
    """`h <- h + a_l f_l(h)`, a_l a learned number per sublayer, 0 at the start; the head reads h. Bachlechner et al.
    2020, arXiv:2003.04887.

    In the source both sublayers of a block share one number; here each has its own. The numbers learn at the matrices'
    rate, without weight decay.
    """

    name: ClassVar[str] = "rezero"
    title: ClassVar[str] = "ReZero"
    learning_rate: ClassVar[float] = 8e-3

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Scalar(0.0)

    def open(self, embedding, at: Boundary, ends) -> Float[Array, "B T D"]:
        return embedding

    def read(self, stream: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return stream

    def advance(self, stream, update, at: Boundary):
        gate = at.gate.value[...]
        return stream + (gate * update).astype(stream.dtype), gate.reshape(1, 1, 1)

    def close(self, stream, ends):
        return stream, jnp.zeros(stream.shape[:-1], jnp.float32)

    def lanes(self, stream):
        return split_lanes(stream)
