"""Block Attention Residuals: every reader attends over the summed updates of blocks of sublayers."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nagjax.ranges import Count
from nagjax.residual.protocol import Boundary, Bridge, SublayerIndex, gate_parameter, split_lanes
from nagjax.residual.schemes.plain import Plain


class Sources(NamedTuple):
    """`values`: the embedding, then the sum of each block's updates (for the current block, of those so far).
    `written`: 1 for a source that has a value already, else 0. `normed`: what the next reader reads."""

    values: Float[Array, "B T N D"]
    written: Float[Array, "B T N"]
    normed: Float[Array, "B T D"]


class Query(nnx.Module):
    """w of the reader after this sublayer; it starts at zero."""

    def __init__(self, width: int):
        self.query = gate_parameter(jnp.zeros((width,)), ("embed",))


@dataclasses.dataclass(frozen=True)
class BlockAttnRes(Plain):
    """`x_l = RMSNorm_l(sum_i a_i v_i)`, `a = softmax_i(w_l . RMSNorm(v_i))` over the embedding, the summed updates of
    each earlier block, and the partial sum of the current block; each `f_l(x_l)` is added to its block's sum. The head
    reads in the same way. Kimi Team 2026, "Attention Residuals", arXiv:2603.15031, Block AttnRes.

    A block is `ceil(sublayers / blocks)` sublayers; the last may be shorter. With no more sublayers than blocks this is
    Full AttnRes. Queries start at zero, so a new model reads in the direction of the ordinary residual. The keys' norm
    has no gain, since w could absorb it. The first sublayer has only one source and needs no w; therefore the w of
    every other reader is stored with the sublayer before it. Telemetry measures the sum of all sources, the ordinary
    residual.
    """

    name: ClassVar[str] = "block_attn_res"
    title: ClassVar[str] = "Block AttnRes"
    rebuilds: ClassVar[bool] = False

    blocks: Count = 8  # maximum number of blocks into which sublayers are grouped

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Query(width)

    def block_of(self, at: Boundary) -> Int[Array, ""]:
        """The 1-based block of the sublayer whose update is committed."""
        size = (at.sublayers + self.blocks - 1) // self.blocks
        return (at.index - 1) // size + 1

    def open(self, embedding, at: Boundary, ends) -> Sources:
        room = ((0, 0), (0, 0), (0, self.blocks))
        values = jnp.pad(embedding[..., None, :], (*room, (0, 0)))
        written = jnp.pad(jnp.ones((*embedding.shape[:2], 1), jnp.float32), room)
        return Sources(values, written, self.normalise(embedding, at))

    def attend(self, values, written, at: Boundary) -> Sources:
        wide = values.astype(jnp.float32)
        length = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1) + self.epsilon)
        scores = jnp.sum(wide * at.gate.query[...], axis=-1) * length
        weights = jax.nn.softmax(jnp.where(written > 0, scores, -jnp.inf), axis=-1)
        read = jnp.sum(weights[..., None] * wide, axis=-2).astype(values.dtype)
        return Sources(values, written, self.normalise(read, at))

    def advance(self, stream: Sources, update, at: Boundary):
        block = self.block_of(at)
        own = jax.lax.dynamic_index_in_dim(stream.values, block, axis=2) + update[..., None, :]
        values = jax.lax.dynamic_update_slice_in_dim(stream.values, own.astype(stream.values.dtype), block, axis=2)
        written = jnp.maximum(stream.written, jax.nn.one_hot(block, self.blocks + 1, dtype=jnp.float32))
        return self.attend(values, written, at), jnp.ones((1, 1, 1), jnp.float32)

    def skip(self, stream: Sources, at: Boundary) -> Sources:
        return self.attend(stream.values, stream.written, at)

    def bridge(self, stays, places, blocks: int) -> Bridge:
        """Each reader takes over the query that is stored with the sublayer before it, even if that sublayer is
        removed."""
        own = super().bridge(stays, places, blocks)
        return own._replace(gates=[reader - 1 for reader in own.entries[1:]])

    def lanes(self, stream: Sources):
        return split_lanes(jnp.sum(stream.values.astype(jnp.float32), axis=-2))
