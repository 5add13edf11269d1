"""The threshold decider."""

import dataclasses
from typing import ClassVar

from nagjax.mod.deciders import Decider


@dataclasses.dataclass(frozen=True)
class Threshold(Decider):
    """A token runs if its score reaches the exponential moving average of the top-k cut in training.

    The cut is the score of the last token let in, averaged over the sequences that have as many tokens as are let in.
    If no sequence of a batch has, the average stays as it is. Scores are compared with the cut minus a margin for
    rounding (`nagjax.mod.selection.lowered`), so that the token from which the cut was taken runs, whatever program
    computes its score. No parameters, no loss.
    """

    name: ClassVar[str] = "threshold"
    trained: ClassVar[bool] = False
    needs_cuts: ClassVar[bool] = True

    def logits(self, own, router, x, scores, cut):
        return scores - cut
