"""Other places for LayerNorm Scaling's factor 1/sqrt(b) (arXiv:2502.05795, Table 8), and LayerNorm Scaling with the
scaled start, a combination that the paper advises against (Table 6). b = 1, 2, ... is the block."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nagjax.residual import register
from nagjax.residual.prenorm import PreNorm, PreNormStream
from nagjax.residual.protocol import Boundary, SublayerIndex
from nagjax.residual.schemes.lns import LNS

factor = LNS().read_scale  # 1/sqrt of the sublayer's block; 1 for the head, whose index is 0


@register
@dataclasses.dataclass(frozen=True)
class OnMLP(LNS):
    """`x = RMSNorm(h) / sqrt(b)` for MLPs, `x = RMSNorm(h)` for attention."""

    name: ClassVar[str] = "lns_on_mlp"
    title: ClassVar[str] = "LNS, norm of the MLP"

    def read_scale(self, reader: Int[Array, ""]) -> Float[Array, ""]:
        return jnp.where(reader % 2 == 0, super().read_scale(reader), 1.0)


@register
@dataclasses.dataclass(frozen=True)
class OnAttention(LNS):
    """`x = RMSNorm(h) / sqrt(b)` for attention, `x = RMSNorm(h)` for MLPs."""

    name: ClassVar[str] = "lns_on_attention"
    title: ClassVar[str] = "LNS, norm of attention"

    def read_scale(self, reader: Int[Array, ""]) -> Float[Array, ""]:
        return jnp.where(reader % 2 == 1, super().read_scale(reader), 1.0)


@register
@dataclasses.dataclass(frozen=True)
class OnBranch(PreNorm):
    """`h <- h + f(RMSNorm(h)) / sqrt(b)`."""

    name: ClassVar[str] = "lns_on_branch"
    title: ClassVar[str] = "LNS, output of the branch"
    learning_rate: ClassVar[float] = LNS.learning_rate

    def advance(self, stream: PreNormStream, update, at: Boundary):
        return super().advance(stream, (factor(at.index) * update).astype(update.dtype), at)


@register
@dataclasses.dataclass(frozen=True)
class BeforeNorm(PreNorm):
    """`x = RMSNorm(h / sqrt(b))`: no factor but for the norm's epsilon, so this measures noise."""

    name: ClassVar[str] = "lns_before_norm"
    title: ClassVar[str] = "LNS, in front of the norm"
    learning_rate: ClassVar[float] = LNS.learning_rate

    def normalise(self, hidden: Float[Array, "B T D"], at: Boundary) -> Float[Array, "B T D"]:
        return super().normalise(factor(at.following) * hidden.astype(jnp.float32), at).astype(hidden.dtype)

    def advance(self, stream: PreNormStream, update, at: Boundary):
        hidden = stream.hidden + update
        return PreNormStream(hidden, self.normalise(hidden, at)), jnp.ones((1, 1, 1), jnp.float32)


@register
@dataclasses.dataclass(frozen=True)
class OnResidual(PreNorm):
    """`h <- (h + f(RMSNorm(h))) / sqrt(b)`."""

    name: ClassVar[str] = "lns_on_residual"
    title: ClassVar[str] = "LNS, residual"
    learning_rate: ClassVar[float] = LNS.learning_rate

    def advance(self, stream: PreNormStream, update, at: Boundary):
        hidden = (factor(at.index) * (stream.hidden + update)).astype(stream.hidden.dtype)
        return PreNormStream(hidden, self.normalise(hidden, at)), jnp.ones((1, 1, 1), jnp.float32)


@register
@dataclasses.dataclass(frozen=True)
class ScaledStart(LNS):
    """LayerNorm Scaling whose output projections start at 1/sqrt(number of sublayers) of their scale."""

    name: ClassVar[str] = "lns_scaled_start"
    title: ClassVar[str] = "LNS and scaled start"

    def output_scale(self, sublayer: SublayerIndex) -> float:
        return sublayer.sublayers**-0.5
