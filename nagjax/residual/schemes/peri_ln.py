"""Peri-LN: norms before and after every branch, on the embedding and at the end."""

import dataclasses
from typing import ClassVar

from flax import nnx

from nagjax.residual.norm import rms_norm
from nagjax.residual.prenorm import Gain, PreNormStream
from nagjax.residual.protocol import Boundary
from nagjax.residual.schemes.sandwich import Sandwich


@dataclasses.dataclass(frozen=True)
class PeriLN(Sandwich):
    """`h_0 = gain_0 * unit(e)`, `h <- h + gain'_l * unit(f_l(gain_l * unit(h)))`, `unit(x) = x / rms(x)`. Kim et al.
    2025, arXiv:2502.02732.

    This is Sandwich-LN with a norm on the embedding e, and a final norm. The norm on a branch's output is applied
    before the addition.
    """

    name: ClassVar[str] = "peri_ln"
    title: ClassVar[str] = "Peri-LN"

    def ends(self, width: int, embedding_std: float, rngs: nnx.Rngs) -> nnx.Module:
        return Gain(width)

    def open(self, embedding, at: Boundary, ends) -> PreNormStream:
        return self.rebuild(rms_norm(embedding, ends.gain[...], self.epsilon), at, ends)

    def rebuild(self, residual, at: Boundary, ends) -> PreNormStream:
        return super().open(residual, at, ends)
