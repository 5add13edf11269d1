"""Plain pre-norm whose deeper blocks start with smaller updates."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from nagjax.residual.prenorm import PreNorm
from nagjax.residual.protocol import SublayerIndex


@dataclasses.dataclass(frozen=True)
class DepthScaled(PreNorm):
    """`h <- h + f_l(RMSNorm_l(h))`; the output projections of block b = 1, 2, ... start at 1/sqrt(2 b) of their usual
    scale. This is the depth-scaled initialisation that arXiv:2502.05795 compares with (Table 6), after Zhang, Titov &
    Sennrich 2019, arXiv:1908.11365, who scale all matrices of a block by 1/sqrt(b).

    The source does not say which matrices it scales. Here these are the output projections, which `plain` scales, too.
    """

    name: ClassVar[str] = "depth_scaled"
    title: ClassVar[str] = "depth-scaled start"

    def output_scale(self, sublayer: SublayerIndex) -> Float[Array, ""]:
        return jnp.asarray(2 * sublayer.block, jnp.float32) ** -0.5
