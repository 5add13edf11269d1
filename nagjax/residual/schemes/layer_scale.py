"""LayerScale: every update is multiplied by one learned factor per feature."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx

from nagjax.ranges import NonNegative
from nagjax.residual.protocol import SublayerIndex, gate_parameter
from nagjax.residual.schemes.skip_init import SkipInit


class Factors(nnx.Module):
    """One learned factor per feature."""

    def __init__(self, width: int, start: float):
        self.value = gate_parameter(jnp.full((width,), start, jnp.float32), ("embed_out",))


@dataclasses.dataclass(frozen=True)
class LayerScale(SkipInit):
    """`h <- h + lambda_l * f_l(RMSNorm_l(h))`, lambda_l [D]. Touvron et al. 2021 (CaiT), arXiv:2103.17239.

    lambda starts at 0.1 in models of up to 18 blocks, at 1e-5 up to 24 and at 1e-6 beyond; all other initial values are
    ordinary. The factors learn at the peak rate, without weight decay.
    """

    name: ClassVar[str] = "layer_scale"
    title: ClassVar[str] = "LayerScale"

    start: NonNegative | None = None  # initial value of the factors; None: 0.1, 1e-5 or 1e-6, depending on depth

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        by_depth = 0.1 if sublayer.blocks <= 18 else 1e-5 if sublayer.blocks <= 24 else 1e-6
        return Factors(width, by_depth if self.start is None else self.start)
