"""The auxiliary-loss decider."""

import dataclasses
from typing import ClassVar

from nagjax.mod.deciders import Decider


@dataclasses.dataclass(frozen=True)
class AuxLoss(Decider):
    """The router's own log-odds, trained as a logit of "is in the top k": a token runs if its odds are at least even.

    Raposo et al. 2024, arXiv:2404.02258, section 3.5, where this costs 0.2 to 0.3% of the language-modelling loss.
    """

    name: ClassVar[str] = "aux_loss"

    needs_odds: ClassVar[bool] = True
