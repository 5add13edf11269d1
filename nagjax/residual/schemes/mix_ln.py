"""Mix-LN: Post-LN in the first blocks, Pre-LN in the rest."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nagjax.ranges import Share
from nagjax.residual.norm import rms_norm
from nagjax.residual.prenorm import PreNorm, PreNormStream
from nagjax.residual.protocol import Boundary, Bridge


@dataclasses.dataclass(frozen=True)
class MixLN(PreNorm):
    """`h <- gain * unit(h + f_l(h))` in the first floor(post L) of L blocks, `h <- h + f_l(gain_l * unit(h))` in the
    rest, `unit(x) = x / rms(x)`; the head reads `gain * unit(h)`. Li et al. 2024, arXiv:2412.13795.

    There is one gain for each reader, as in plain pre-norm. The number of gains is that of the source, and the model
    expresses the same functions, but a Post-LN sublayer uses the gain in the next reader's entry. This moves two gains.
    The first Pre-LN sublayer, whose entry is already used, reads `unit(h)`; the entry of the first Post-LN sublayer is
    a gain on the embedding that it reads. Both gains would act on a branch's input, whose matrices can absorb them.
    With `post` 1 there is no Pre-LN sublayer, and the head takes the place of the first one: it reads `unit(h)`.
    """

    name: ClassVar[str] = "mix_ln"
    title: ClassVar[str] = "Mix-LN"
    learning_rate: ClassVar[float] = 2.5e-3  # 8e-3 was worse at 16 blocks x 32; no finer search

    post: Share = 0.25  # share of the blocks, the first ones, that are Post-LN

    def border(self, at: Boundary) -> Int[Array, ""]:
        """The number of the last Post-LN sublayer; 0 if there is none."""
        blocks = jnp.asarray(at.blocks, jnp.float32)
        post = jnp.floor(self.post * blocks + 1e-4).astype(jnp.int32)  # tolerates a product just below an integer
        return jnp.minimum(2 * post, at.sublayers)  # the last block may have a single sublayer

    def normalise(self, hidden: Float[Array, "B T D"], at: Boundary) -> Float[Array, "B T D"]:
        """The next reader's input, given the residual."""
        reader, border = jnp.where(at.following == 0, at.sublayers + 1, at.following), self.border(at)
        own_gain: Bool[Array, ""] = (reader == 1) | (reader > border + 1)
        gain = jnp.where(own_gain, at.entry.gain[...], 1.0)
        raw = (gain * hidden.astype(jnp.float32)).astype(hidden.dtype)
        return jnp.where(reader > border, rms_norm(hidden, gain, self.epsilon), raw)

    def advance(self, stream: PreNormStream, update, at: Boundary):
        total = stream.hidden + update.astype(stream.hidden.dtype)
        hidden = jnp.where(at.index <= self.border(at), rms_norm(total, at.entry.gain[...], self.epsilon), total)
        return PreNormStream(hidden, self.normalise(hidden, at)), jnp.ones((1, 1, 1), jnp.float32)

    def bridge(self, stays, places, blocks: int) -> Bridge:
        """A Post-LN block normalises by the entry of the reader after it. If that reader is removed, the next reader
        takes over its entry, unless this reader needs its own, as all Pre-LN blocks but the first do; then pruning
        changes the function of the model."""
        own, post = super().bridge(stays, places, blocks), math.floor(self.post * blocks + 1e-4)
        free = [place <= post for place in (*places, blocks)]  # readers that do not use their entry themselves
        after = [before + 1 if free[it] else it for before, it in zip(stays, own.entries[1:], strict=True)]
        return own._replace(entries=own.entries[:1] + after)
