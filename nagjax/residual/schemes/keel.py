"""Keel: post-norm with a weighted skip."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx

from nagjax.ranges import Fraction
from nagjax.residual.norm import rms_norm
from nagjax.residual.prenorm import Gain, PreNorm, PreNormStream
from nagjax.residual.protocol import Boundary, SublayerIndex


@dataclasses.dataclass(frozen=True)
class Keel(PreNorm):
    """`h <- N'_l(S h + f_l(N_l(h)))`, S the number of sublayers; N, N' are RMSNorms, each with a gain of its own.

    Chen & Wei 2026, "Post-LayerNorm Is Back", arXiv:2601.19895. In the first block, attention writes as in pre-norm,
    `h <- h + f_1(N_1(h))`, and the MLP's skip has weight 1. Initial values are ordinary: no branch is scaled.

    Choices where the source is silent: RMSNorm; the head reads the last state through a norm of its own, as every
    sublayer does; the first attention has no N', so its gain multiplies the update instead, which its output projection
    could do as well. In a pruned model S is the number before pruning.

    An update is about 1/S of the state to which it is added. With some hundred sublayers, bfloat16, which resolves
    1/256, keeps only the coarse part of each update.
    """

    name: ClassVar[str] = "keel"
    title: ClassVar[str] = "Keel"
    learning_rate: ClassVar[float] = 8e-3  # plain's; not tuned

    epsilon: Fraction = 1e-6  # epsilon of both norms

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Gain(width)

    def advance(self, stream: PreNormStream, update, at: Boundary):
        first, gain = at.index == 1, at.gate.gain[...]
        skip = jnp.where(at.index <= 2, 1.0, jnp.float32(at.sublayers))
        written = jnp.where(first, gain, 1.0) * update.astype(jnp.float32)
        total = skip * stream.hidden.astype(jnp.float32) + written
        hidden = jnp.where(first, total, rms_norm(total, gain, self.epsilon)).astype(stream.hidden.dtype)
        return PreNormStream(hidden, self.normalise(hidden, at)), jnp.ones((1, 1, 1), jnp.float32)
