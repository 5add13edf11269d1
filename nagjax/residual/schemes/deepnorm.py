"""DeepNorm: Post-LN that keeps more of the old state, the deeper the model."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from nagjax.residual.protocol import Boundary, SublayerIndex
from nagjax.residual.schemes.post_ln import PostLN


@dataclasses.dataclass(frozen=True)
class DeepNorm(PostLN):
    """`h <- gain_l * unit(alpha h + f_l(h))`, `alpha = (2 L)^(1/4)`, L blocks. Wang et al. 2022, arXiv:2203.00555, its
    rule for decoders alone; constants as in torchscale's decoder.

    Values, attention's output and both maps of the feed-forward branch start divided by `(8 L)^(1/4)`, queries and keys
    do not. Elsewhere alpha is found fixed at 2.83 (right for 32 blocks) with a start *multiplied* by that factor, and
    results of "DeepNorm" that are results of that. Choices where the source is silent: the undivided start is the
    library's normal of variance 1/fan-in, not Xavier's; of a gated feed-forward branch the up projection is divided
    and the gate is not, so that the branch at the start is 1/sqrt(8 L) of itself like attention (torchscale also
    divides one of the two, the one inside the activation).
    """

    name: ClassVar[str] = "deepnorm"
    title: ClassVar[str] = "DeepNorm"
    learning_rate: ClassVar[float] = 8e-3

    def kept(self, at: Boundary) -> Float[Array, ""]:
        return jnp.asarray(at.sublayers, jnp.float32) ** 0.25

    def output_scale(self, sublayer: SublayerIndex) -> float:
        return (8 * sublayer.blocks) ** -0.25

    def inner_scale(self, sublayer: SublayerIndex) -> float:
        return (8 * sublayer.blocks) ** -0.25
