"""How many tokens a run saves compared with another, read from their validation curves."""

import math
from collections.abc import Sequence


def tokens_to(curve: Sequence[Sequence[float]], loss: float) -> float:
    """The tokens after which a validation curve [tokens, loss] first falls to `loss`, interpolated linearly in the
    logarithm of the tokens; infinite if it never does."""
    before = None
    for tokens, value in curve:
        if tokens > 0 and value <= loss:
            if before is None or before[1] <= value:
                return float(tokens)
            share = (before[1] - loss) / (before[1] - value)
            return float(math.exp(math.log(before[0]) + share * (math.log(tokens) - math.log(before[0]))))
        if tokens > 0:
            before = (tokens, value)
    return math.inf


def speed_up(curve: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> float:
    """The tokens that the reference needs divided by those that the run needs, to reach the final loss of the worse of
    the two. On one cosine schedule this flatters a run that learns faster early."""
    loss = max(curve[-1][1], reference[-1][1])
    return tokens_to(reference, loss) / tokens_to(curve, loss)
