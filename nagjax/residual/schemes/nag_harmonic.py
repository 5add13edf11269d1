"""NAG whose step sizes start at 1, 1/2, 1/3, ..."""

import dataclasses
from typing import ClassVar

from nagjax.ranges import NonNegative
from nagjax.residual.protocol import Scheme
from nagjax.residual.schemes.nag import NAG


@dataclasses.dataclass(frozen=True)
class NAGHarmonic(NAG):
    """NAG with `alpha_l = 1/l` at the start instead of 1/sqrt(l) as in its source, Figliolia & Millidge 2026,
    arXiv:2606.16112.

    A sublayer turns the residual by at most arctan alpha_l and lengthens it by at most sqrt(1 + alpha_l^2). So before
    training S sublayers, whatever they write, turn it by at most 1 + ln S radians and lengthen it by less than
    sqrt(sinh(pi)/pi) = 1.92 at any depth; with 1/sqrt(l) the bounds are 2 sqrt(S) and sqrt(S + 1).

    The start 1/l is this project's choice. At the training FLOPs that Review takes for 1M and 2.1M tokens it is ahead
    of plain, Review and pre-norm ReZero, at 16 and 64 blocks x 64 (experiments/pages/equal_flops.md,
    equal_flops_rezero.md). More blocks were not compared, and at 64 blocks most of its sublayers end with small
    updates, more than in plain. At equal tokens it gains nothing over 1/sqrt(l) at 16 blocks
    (experiments/pages/nag_start.md). At 64 blocks it gains 0.03 nats after 1M and 2.1M tokens, where it is level with
    Review or ahead (experiments/pages/sixty_four_blocks.md); after 4.2M it is still ahead of plain, but no longer
    distinguishable from 1/sqrt(l) (experiments/pages/start_and_tokens.md). The default learning rate is within a factor
    of 1.6 of the best ones found at 16, 32 and 64 blocks x 64, on one seed.
    """

    name: ClassVar[str] = "nag_harmonic"
    title: ClassVar[str] = "NAG from 1/l"
    learning_rate: ClassVar[float] = 8e-3

    alpha_power: NonNegative = 1.0  # p: alpha of sublayer l starts at l ** -p

    def default_rate(self, width, depth):
        """The same at every depth: runs at 16, 32 and 64 blocks gave no reason for another rule."""
        return Scheme.default_rate(self, width, depth)
