"""Progressive residual warm-up: deeper blocks are switched on later."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from nagjax.ranges import Share
from nagjax.residual.prenorm import PreNorm, PreNormStream
from nagjax.residual.protocol import Boundary


@dataclasses.dataclass(frozen=True)
class ProRes(PreNorm):
    """`h <- h + a(b, t) f_l(RMSNorm_l(h))`, `a(b, t) = min(L t / (ramp b), 1)` for both sublayers of block b = 1 .. L;
    t is the share of the training done.

    Chen et al. 2026, "Progressive Residual Warmup for Language Model Pretraining", arXiv:2603.05369, on pre-norm with
    ordinary initial values. The paper has `a = min(step / (T b), 1)` with T = 1000 steps (500 from 96 blocks on), so
    the last block has full weight after T L steps. Here `ramp` is the share of the training that these steps take: T
    steps per block in a training of n steps is `ramp = T L / n`, which is 0.24 for T = 1000, 24 blocks and 100 000
    steps.

    Choices where the source is silent: a ramp longer than the training is refused, so that a finished model is plain
    pre-norm; further training has no ramp. With `ramp` 0 the model is pre-norm from the first step. In the first step,
    with t = 0, no branch has a gradient.
    """

    name: ClassVar[str] = "prores"
    title: ClassVar[str] = "ProRes"
    learning_rate: ClassVar[float] = 8e-3  # plain's; not tuned

    ramp: Share = 0.25  # share of the training after which the last block has full weight; T L / steps in the source

    def trained(self):
        return dataclasses.replace(self, ramp=0.0)

    def weight(self, at: Boundary) -> Float[Array, ""]:
        """The factor on the sublayer's update at this point of the training, float32."""
        if not self.ramp:
            return jnp.float32(1.0)
        block, blocks = jnp.maximum((at.index + 1) // 2, 1), at.blocks
        return jnp.minimum(at.progress * blocks / (self.ramp * block), 1.0).astype(jnp.float32)

    def advance(self, stream: PreNormStream, update, at: Boundary):
        return super().advance(stream, self.weight(at) * update, at)
