"""The auxiliary-loss decider."""

import dataclasses
from typing import ClassVar

from nagjax.mod.deciders import Decider


@dataclasses.dataclass(frozen=True)
class AuxLoss(Decider):
    """The router's own odds, trained as a logit of "is in the top k": a token runs where they are at least even.

    Raposo et al. 2024, arXiv:2404.02258, section 3.5, who pay 0.2 to 0.3% of the language-modelling loss for it.
    """

    name: ClassVar[str] = "aux_loss"

    needs_odds: ClassVar[bool] = True
