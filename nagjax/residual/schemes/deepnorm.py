"""DeepNorm: Post-LN that keeps more of the old state, the deeper the model."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from nagjax.residual.protocol import Boundary, SublayerIndex
from nagjax.residual.schemes.post_ln import PostLN


@dataclasses.dataclass(frozen=True)
class DeepNorm(PostLN):
    """`h <- gain_l * unit(alpha h + f_l(h))`, `alpha = (2 L)^(1/4)`, L blocks, `unit(x) = x / rms(x)`. Wang et al.
    2022, arXiv:2203.00555, the rule for decoder-only models, with RMSNorm in place of LayerNorm; constants as in
    torchscale's decoder.

    The initial values of attention's values and output and of the feed-forward branch's up and down projections are
    divided by `(8 L)^(1/4)`; queries and keys are not. Some published "DeepNorm" results use something else: alpha
    fixed at 2.83 (right for 32 blocks) and initial values *multiplied* by `(8 L)^(1/4)`. Choices where the source is
    silent: before the division, initial values are the library's normal of variance 1/fan-in, not Xavier's; in a gated
    feed-forward branch the gate is not divided, so that the branch starts scaled by 1/sqrt(8 L), as attention does
    (torchscale also divides one of the gate and up projections, the one inside the activation).
    """

    name: ClassVar[str] = "deepnorm"
    title: ClassVar[str] = "DeepNorm"

    def kept(self, at: Boundary) -> Float[Array, ""]:
        return jnp.asarray(2 * at.blocks, jnp.float32) ** 0.25

    def output_scale(self, sublayer: SublayerIndex) -> float:
        return (8 * sublayer.blocks) ** -0.25

    def inner_scale(self, sublayer: SublayerIndex) -> float:
        return (8 * sublayer.blocks) ** -0.25
