"""Sandwich-LN: a norm before and after every branch."""

import dataclasses
from typing import ClassVar

from flax import nnx

from nagjax.residual.norm import rms_norm
from nagjax.residual.prenorm import Gain, PreNorm, PreNormStream
from nagjax.residual.protocol import Boundary, SublayerIndex


@dataclasses.dataclass(frozen=True)
class Sandwich(PreNorm):
    """`h <- h + gain'_l * unit(f_l(gain_l * unit(h)))`, and a final norm. Ding et al. 2021 (CogView), arXiv:2105.13290,
    with RMSNorm in place of LayerNorm. The norm on a branch's output is applied before the addition; its gain starts at
    1."""

    name: ClassVar[str] = "sandwich"
    title: ClassVar[str] = "Sandwich-LN"
    router: ClassVar[str] = "random"
    scale_free: ClassVar[bool] = True

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Gain(width)

    def advance(self, stream: PreNormStream, update, at: Boundary):
        return super().advance(stream, rms_norm(update, at.gate.gain[...], self.epsilon), at)
