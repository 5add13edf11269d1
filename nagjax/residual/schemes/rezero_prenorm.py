"""ReZero in pre-norm form: branches read the normalised residual, the head reads the residual itself."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nagjax.ranges import NonNegative
from nagjax.residual.norm import rms_norm
from nagjax.residual.prenorm import PreNorm, PreNormStream
from nagjax.residual.protocol import Boundary, Nothing, SublayerIndex
from nagjax.residual.schemes.skip_init import Scalar
from pallas_kernels import add_rms_norm


@dataclasses.dataclass(frozen=True)
class ReZeroPreNorm(PreNorm):
    """`h <- h + a_l f_l(h / rms(h))`, a_l a learned number per sublayer, 0 at the start; the head reads h, without a
    norm. The gates are from Bachlechner et al. 2020, arXiv:2003.04887, the norm in the branch from Xiong et al. 2020,
    arXiv:2002.04745; the head without a norm is this project's choice.

    The norm has no gain, since the matrices after it could absorb it. The numbers a_l learn at the peak rate,
    without weight decay. `|h| <= |h_0| + sum_l |a_l| |f_l|`, with equality for updates along h_0. A branch with a
    normalised input is bounded by its matrices, so the gates limit how much the residual can grow.
    """

    name: ClassVar[str] = "rezero_prenorm"
    title: ClassVar[str] = "ReZero, pre-norm"

    start: NonNegative = 0.0  # initial value of the gates

    def entry(self, width: int, rngs: nnx.Rngs) -> nnx.Module:
        return Nothing()

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Scalar(self.start)

    def advance(
        self, stream: PreNormStream, update: Float[Array, "B T D"], at: Boundary
    ) -> tuple[PreNormStream, Float[Array, "1 1 1"]]:
        gate = at.gate.value[...]
        written = (gate * update).astype(stream.hidden.dtype)
        ones = jnp.ones(written.shape[-1:], jnp.float32)
        return PreNormStream(*add_rms_norm(stream.hidden, written, ones, epsilon=self.epsilon)), gate.reshape(1, 1, 1)

    def normalise(self, hidden: Float[Array, "B T D"], at: Boundary) -> Float[Array, "B T D"]:
        return rms_norm(hidden, jnp.ones(hidden.shape[-1:], jnp.float32), self.epsilon)

    def close(self, stream: PreNormStream, ends) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
        return stream.hidden, jnp.zeros(stream.hidden.shape[:-1], jnp.float32)
