"""SkipInit: every update is multiplied by one learned number."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx

from nagjax.ranges import NonNegative
from nagjax.residual.prenorm import PreNorm, PreNormStream
from nagjax.residual.protocol import Boundary, SublayerIndex, gate_parameter


class Scalar(nnx.Module):
    """One learned number."""

    def __init__(self, start: float):
        self.value = gate_parameter(jnp.float32(start), ())


@dataclasses.dataclass(frozen=True)
class SkipInit(PreNorm):
    """`h <- h + a_l f_l(RMSNorm_l(h))`, a_l a learned number per sublayer. De & Smith 2020, arXiv:2002.10444.

    The original has no norm in the branch and starts at 0. This is the form that arXiv:2502.05795 compares with:
    pre-norm, started at 1/sqrt(L) for L blocks. Choice where the sources are silent: the numbers a_l learn at the
    peak rate, without weight decay.
    """

    name: ClassVar[str] = "skip_init"
    title: ClassVar[str] = "SkipInit"

    start: NonNegative | None = None  # initial value of the factors; None: 1/sqrt(number of blocks)

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Scalar(sublayer.blocks**-0.5 if self.start is None else self.start)

    def advance(self, stream: PreNormStream, update, at: Boundary):
        gate = at.gate.value[...]
        hidden = stream.hidden + (gate * update).astype(stream.hidden.dtype)
        return PreNormStream(hidden, self.normalise(hidden, at)), gate.reshape(1, 1, -1)
