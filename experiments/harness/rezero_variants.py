"""Pre-norm ReZero with one of its parts changed."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx

from nagjax.residual import register
from nagjax.residual.norm import rms_norm
from nagjax.residual.prenorm import Gain, PreNormStream
from nagjax.residual.protocol import SublayerIndex
from nagjax.residual.schemes.layer_scale import Factors
from nagjax.residual.schemes.rezero_prenorm import ReZeroPreNorm
from nagjax.residual.schemes.skip_init import Scalar, SkipInit


class Written(ReZeroPreNorm):
    """The update of the residual computed by its equation, for any gate and norm."""

    advance = SkipInit.advance


@register
@dataclasses.dataclass(frozen=True)
class SkipStarted(ReZeroPreNorm):
    """Gates start at 1/sqrt(number of blocks), as SkipInit's do here."""

    name: ClassVar[str] = "skip_started"
    title: ClassVar[str] = "pre-norm ReZero from 1/sqrt(L)"

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Scalar(sublayer.blocks**-0.5)


@register
@dataclasses.dataclass(frozen=True)
class SlowGates(ReZeroPreNorm):
    """Gates learn at a twelfth of the matrices' rate."""

    name: ClassVar[str] = "slow_gates"
    title: ClassVar[str] = "pre-norm ReZero, slow gates"
    gate_rate: ClassVar[float] = 1 / 12


@register
@dataclasses.dataclass(frozen=True)
class NormedHead(ReZeroPreNorm):
    """The head reads the normalised residual."""

    name: ClassVar[str] = "normed_head"
    title: ClassVar[str] = "pre-norm ReZero, normalised head"

    def close(self, stream: PreNormStream, ends):
        return stream.normed, jnp.zeros(stream.normed.shape[:-1], jnp.float32)


@register
@dataclasses.dataclass(frozen=True)
class WithGains(Written):
    """A gain per feature on what a branch reads, as pre-norm has it. The head's is a parameter that nothing reads."""

    name: ClassVar[str] = "with_gains"
    title: ClassVar[str] = "pre-norm ReZero, gains"

    def entry(self, width: int, rngs: nnx.Rngs) -> nnx.Module:
        return Gain(width)

    def normalise(self, hidden, at):
        return rms_norm(hidden, at.entry.gain[...], self.epsilon)


@register
@dataclasses.dataclass(frozen=True)
class WideGates(Written):
    """A gate per feature."""

    name: ClassVar[str] = "wide_gates"
    title: ClassVar[str] = "pre-norm ReZero, a gate per feature"

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Factors(width, self.start)


@register
@dataclasses.dataclass(frozen=True)
class Centred(Written):
    """Branches read LayerNorm: the mean over the features goes before the norm."""

    name: ClassVar[str] = "centred"
    title: ClassVar[str] = "pre-norm ReZero, centred"

    def normalise(self, hidden, at):
        mean = jnp.mean(hidden.astype(jnp.float32), axis=-1, keepdims=True)
        return super().normalise((hidden - mean).astype(hidden.dtype), at)
