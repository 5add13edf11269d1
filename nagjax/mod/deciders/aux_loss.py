"""The auxiliary-loss decider."""

import dataclasses
from typing import ClassVar

from nagjax.errors import UserError
from nagjax.mod.deciders import Decider


@dataclasses.dataclass(frozen=True)
class AuxLoss(Decider):
    """The router's own score, trained as a logit of "is in the top k": it runs where `sigmoid(score) >= 1/2`.

    Raposo et al. 2024, arXiv:2404.02258, section 3.5, who pay 0.2 to 0.3% of the language-modelling loss for it.
    """

    name: ClassVar[str] = "aux_loss"

    def check(self, router):
        if router.name != "linear":
            fix = f"the {router.name} router's score is no logit: use --mod.decider threshold or predictor"
            raise UserError("mod.decider", self.name, fix)

    def logits(self, own, x, scores, cut):
        return scores
