"""CompleteP's residual: branches are weighted so that one learning rate suits every depth."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from nagjax.ranges import Count, Fraction, Share
from nagjax.residual.prenorm import PreNorm, PreNormStream
from nagjax.residual.protocol import Boundary


@dataclasses.dataclass(frozen=True)
class CompleteP(PreNorm):
    """`h <- h + (L / base_depth)^-exponent f_l(RMSNorm_l(h))`, L the number of blocks.

    Dey et al. 2025, "Don't be lazy: CompleteP enables compute-efficient deep transformers", arXiv:2505.01618, Table 1:
    exponent 1 is CompleteP, 1/2 depth-muP, 0 muP. Initial values are ordinary: no branch is scaled. The hidden
    matrices' learning rate is proportional to `(L / base_depth)^(exponent - 1)` and to 1/width: at exponent 1 it is
    independent of depth.

    This is the residual alone, with one learning rate for all parameters. `--parametrization completep` adds the rest
    of Table 1: rates, decay and epsilon by role, width and depth (`nagjax/model/parametrization.py`). In a pruned model
    L is the number before pruning.
    """

    name: ClassVar[str] = "completep"
    title: ClassVar[str] = "CompleteP"
    learning_rate: ClassVar[float] = 8e-3  # plain's; not tuned

    base_depth: Count = 2  # number of blocks at which updates have weight 1; 2 in the source
    exponent: Share = 1.0  # 1: CompleteP; 0.5: depth-muP; 0: muP
    epsilon: Fraction = 1e-6  # epsilon of the norm

    def depth_ratio(self, depth: int) -> tuple[float, float]:
        return depth / self.base_depth, self.exponent

    def default_rate(self, width: int, depth: int) -> float:
        """The rate at `base_depth` blocks, times `(L / base_depth)^(exponent - 1)`."""
        return super().default_rate(width, depth) * (depth / self.base_depth) ** (self.exponent - 1.0)

    def advance(self, stream: PreNormStream, update, at: Boundary):
        weight = (jnp.float32(at.blocks) / self.base_depth) ** -self.exponent
        return super().advance(stream, weight * update, at)
