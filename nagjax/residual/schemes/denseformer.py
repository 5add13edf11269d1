"""DenseFormer: after some blocks, the output is averaged with the outputs of earlier blocks."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from nagjax.ranges import Count
from nagjax.residual.protocol import Boundary, gate_parameter, split_lanes
from nagjax.residual.schemes.plain import Plain


class History(NamedTuple):
    """`past`: the embedding and the block outputs at the averaging points so far; zeros for later points. `weights`:
    alpha, flattened by rows, the same for every token; it is in the stream because `advance` has no access to `ends`.
    `hidden`: the residual. `normed`: what the next reader reads."""

    past: Float[Array, "B T N D"]
    weights: Float[Array, "B T W"]
    hidden: Float[Array, "B T D"]
    normed: Float[Array, "B T D"]


class Weights(nnx.Module):
    """alpha [points, points + 1]; row m belongs to point m + 1 and starts at 1 for its own block, 0 for earlier
    ones."""

    def __init__(self, points: int):
        self.alpha = gate_parameter(jnp.eye(points, points + 1, 1), (None, None))


@dataclasses.dataclass(frozen=True)
class DenseFormer(Plain):
    """`X_i = block_i(Y_i-1)`, `Y_i = sum_j alpha_ij X_j`. The blocks are pre-norm. At an averaging point the sum is
    over the embedding X_0 and the points j <= i; elsewhere `Y_i = X_i`. Pagliardini et al. 2024, arXiv:2402.02622,
    Section 3.

    alpha starts at 1 for j = i and 0 otherwise, which is a pre-norm model. Every `ceil(blocks / points)`-th block is a
    point: the paper's k x p form with dilation k equal to period p (in the paper's 4 x 5, k and p differ). So memory
    for past outputs does not grow with depth. With no more blocks than points it is the dense form.

    A block's MLP takes the average when it commits its update. A token that skips the MLP keeps its residual, without
    averaging at this point; later averages still include its output. Where no MLP runs (`--mod.mlp-rate 1`), no average
    is taken.
    """

    name: ClassVar[str] = "denseformer"
    title: ClassVar[str] = "DenseFormer"
    rebuilds: ClassVar[bool] = False

    points: Count = 8  # maximum number of averaging points

    def ends(self, width: int, embedding_std: float, rngs: nnx.Rngs) -> nnx.Module:
        return Weights(self.points)

    def point(self, at: Boundary) -> tuple[Bool[Array, ""], Int[Array, ""]]:
        """Whether this sublayer ends a block that is a point, and the point's 1-based number."""
        period = (at.blocks + self.points - 1) // self.points
        block = (at.index + 1) // 2
        return at.ends_block & (block % period == 0), block // period

    def open(self, embedding, at: Boundary, ends) -> History:
        past = jnp.pad(embedding[..., None, :], ((0, 0), (0, 0), (0, self.points), (0, 0)))
        alpha = ends.alpha[...].reshape(-1)
        weights = jnp.broadcast_to(alpha, (*embedding.shape[:2], alpha.size))
        return History(past, weights, embedding, self.normalise(embedding, at))

    def kept(self, past: Float[Array, "B T N D"], hidden, at: Boundary) -> Float[Array, "B T N D"]:
        """The past outputs; at a point, with this block's output added."""
        here, number = self.point(at)
        before = jax.lax.dynamic_index_in_dim(past, number, axis=2)
        own = jnp.where(here, hidden[..., None, :], before)
        return jax.lax.dynamic_update_slice_in_dim(past, own, number, axis=2)

    def averaged(self, past: Float[Array, "B T N D"], stream: History, at: Boundary) -> Float[Array, "B T D"]:
        _, number = self.point(at)
        table = stream.weights.reshape(*stream.weights.shape[:2], self.points, self.points + 1)
        row = jax.lax.dynamic_index_in_dim(table, number - 1, axis=2, keepdims=False)
        return jnp.sum(row[..., None] * past.astype(jnp.float32), axis=-2).astype(past.dtype)

    def advance(self, stream: History, update, at: Boundary):
        output = stream.hidden + update.astype(stream.hidden.dtype)
        past = self.kept(stream.past, output, at)
        hidden = jax.lax.cond(
            self.point(at)[0], lambda past, _: self.averaged(past, stream, at), lambda _, output: output, past, output
        )
        after = History(past, stream.weights, hidden, self.normalise(hidden, at))
        return after, jnp.ones((1, 1, 1), jnp.float32)

    def skip(self, stream: History, at: Boundary) -> History:
        past = self.kept(stream.past, stream.hidden, at)
        return stream._replace(past=past, normed=self.normalise(stream.hidden, at))

    def lanes(self, stream: History):
        return split_lanes(stream.hidden)
