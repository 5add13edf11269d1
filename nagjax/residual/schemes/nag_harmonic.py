"""NAG whose step sizes start at 1, 1/2, 1/3, ..."""

import dataclasses
from typing import ClassVar

from nagjax.ranges import NonNegative
from nagjax.residual.protocol import Scheme
from nagjax.residual.schemes.nag import NAG


@dataclasses.dataclass(frozen=True)
class NAGHarmonic(NAG):
    """NAG with `alpha_l = 1/l` at the start, for 1/sqrt(l) in its source, Figliolia & Millidge 2026, arXiv:2606.16112.

    The step sizes of L sublayers then add up to about log(L) before training, and not to 2 sqrt(L). This project's
    choice: after 1M and 2.1M tokens it is ahead of plain and Review at equal training FLOPs, at 16 and 64 blocks
    (experiments/pages/equal_flops.md); more than 64 blocks were not compared. In these runs the best learning rate at
    16, 32 and 64 blocks x 64 is within a factor of 1.6 of the default, which, unlike NAG's, does not fall with depth.
    """

    name: ClassVar[str] = "nag_harmonic"
    title: ClassVar[str] = "NAG from 1/l"
    learning_rate: ClassVar[float] = 8e-3

    alpha_power: NonNegative = 1.0  # p, alpha_l starts at l ** -p

    def default_rate(self, width, depth):
        return Scheme.default_rate(self, width, depth)
