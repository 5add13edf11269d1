"""The threshold decider."""

import dataclasses
from typing import ClassVar

from nagjax.mod.deciders import Decider


@dataclasses.dataclass(frozen=True)
class Threshold(Decider):
    """A token runs if its score reaches the exponential moving average of the top-k cut in training.

    The cut is the score of the last token let in, averaged over the batch's sequences. No parameters, no loss.
    """

    name: ClassVar[str] = "threshold"
    trained: ClassVar[bool] = False
    needs_cuts: ClassVar[bool] = True

    def logits(self, own, x, scores, cut):
        return scores - cut
