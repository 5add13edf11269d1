"""ReZero: no norm; every update has a learned factor that starts at zero."""

import dataclasses
from typing import ClassVar

from flax import nnx

from nagjax.residual.direct import Direct
from nagjax.residual.protocol import Boundary, SublayerIndex
from nagjax.residual.schemes.skip_init import Scalar


@dataclasses.dataclass(frozen=True)
class ReZero(Direct):
    """`h <- h + a_l f_l(h)`, a_l a learned number per sublayer, 0 at the start; the head reads h. Bachlechner et al.
    2020, arXiv:2003.04887.

    In the source both sublayers of a block share one number; here each has its own. The numbers learn at the peak
    rate, without weight decay.
    """

    name: ClassVar[str] = "rezero"
    title: ClassVar[str] = "ReZero"

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Scalar(0.0)

    def advance(self, stream, update, at: Boundary):
        gate = at.gate.value[...]
        return stream + (gate * update).astype(stream.dtype), gate.reshape(1, 1, 1)
