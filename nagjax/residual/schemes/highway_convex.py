"""Convex Highway residual: the gate weighs the state against the update."""

import dataclasses
from typing import ClassVar

from nagjax.residual.schemes.highway import Highway


@dataclasses.dataclass(frozen=True)
class HighwayConvex(Highway):
    """`h <- (1 - r) * h + r * f(RMSNorm(h))`, `r = sigmoid(W h + b)`.

    Every sublayer forgets part of the state, so gradients vanish with depth. arXiv:2606.31859, "Depth stability",
    reports for the convex form of its own gate, which also reads the update, that it does not train beyond about 20
    layers; it reports nothing on this form. experiments/review_depth.py tests both.
    """

    name: ClassVar[str] = "highway_convex"
    title: ClassVar[str] = "Highway (convex)"

    def carry(self, gate):
        return 1.0 - gate
