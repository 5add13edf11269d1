"""CompleteP's residual: branches weighted so that a learning rate holds at every depth."""

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
    exponent 1 is CompleteP, 1/2 depth-muP, 0 muP. No branch starts scaled. The hidden matrices' learning rate goes
    with `(L / base_depth)^(exponent - 1)` and with 1/width: at exponent 1 the default rate does not know the depth.

    Left out, because there is one learning rate and one AdamW for all parameters here: embedding, gains and head would
    learn at a rate without 1/width (embedding and head also without the depth); weight decay would grow with width,
    so that rate times decay stays; AdamW's epsilon (1e-8 here) would shrink with width and depth. The head has its
    factor 1/width in its rate; its start is of spread 1/2 at every width. Attention's logits are divided by the root of
    d_head, not by d_head: QK-norm, on by default, bounds them. In a pruned model L is the number before.
    """

    name: ClassVar[str] = "completep"
    title: ClassVar[str] = "CompleteP"
    learning_rate: ClassVar[float] = 8e-3  # plain's; not tuned

    base_depth: Count = 2  # blocks at which updates have weight 1; the source's
    exponent: Share = 1.0  # 1: CompleteP; 0.5: depth-muP; 0: muP
    epsilon: Fraction = 1e-6  # in the norm

    def default_rate(self, width: int, depth: int) -> float:
        """The one at `base_depth` blocks, times what the exponent makes of the depth."""
        return super().default_rate(width, depth) * (depth / self.base_depth) ** (self.exponent - 1.0)

    def advance(self, stream: PreNormStream, update, at: Boundary):
        weight = (jnp.float32(at.blocks) / self.base_depth) ** -self.exponent
        return super().advance(stream, (weight * update).astype(update.dtype), at)
