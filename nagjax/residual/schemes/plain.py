"""Plain pre-norm: the baseline for all other schemes."""

import dataclasses
from typing import ClassVar

from nagjax.ranges import Fraction
from nagjax.residual.prenorm import PreNorm
from nagjax.residual.protocol import SublayerIndex


@dataclasses.dataclass(frozen=True)
class Plain(PreNorm):
    """`h <- h + f_l(RMSNorm_l(h))`. Pre-LN with RMSNorm (Zhang & Sennrich 2019; Xiong et al. 2020)."""

    name: ClassVar[str] = "plain"
    title: ClassVar[str] = "plain pre-norm"

    # GPT-2's initialisation, which makes the stronger baseline
    scaled_start: bool = True  # divide initial output projections by sqrt(number of sublayers)
    epsilon: Fraction = 1e-6  # epsilon of the norm

    def output_scale(self, sublayer: SublayerIndex) -> float:
        return sublayer.sublayers**-0.5 if self.scaled_start else 1.0
