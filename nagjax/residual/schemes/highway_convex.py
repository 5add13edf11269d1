"""Convex Highway residual: a baseline that is known to fail in deep models."""

import dataclasses
from typing import ClassVar

from nagjax.residual.schemes.highway import Highway


@dataclasses.dataclass(frozen=True)
class HighwayConvex(Highway):
    """`h <- (1 - r) * h + r * f(RMSNorm(h))`, `r = sigmoid(W h + b)`.

    Every sublayer forgets part of the state, so gradients vanish with depth: arXiv:2606.31859 reports that the convex
    form does not train beyond about 20 layers.
    """

    name: ClassVar[str] = "highway_convex"
    title: ClassVar[str] = "Highway (convex)"

    def carry(self, gate):
        return 1.0 - gate
