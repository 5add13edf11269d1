"""Choosing tokens by score, with static shapes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from nagjax.layers.where import Where
from pallas_kernels.placement import current_placement, on_shards, varying


class Chosen(NamedTuple):
    """The chosen tokens of each sequence in their original order, and the score of the last one let in: -inf if a
    sequence has fewer than k tokens."""

    indices: Int[Array, "B k"]
    cut: Float[Array, " B"]


def top_tokens(scores: Float[Array, "B T"], where: Where, k: int) -> Chosen:
    """The k highest scores of each sequence, exactly k: among equal scores the earlier token is chosen. Copies of a
    token may have scores that differ by rounding alone; these differences rank them, so another mesh may choose another
    copy.

    Padding is chosen only when no other tokens are left. Indices are int32 and sorted; nothing here has a gradient. On
    a mesh each device ranks its own sequences: XLA's GPU partitioner would gather all scores for a top-k.
    """
    ranked = jnp.where(where.segments > 0, jax.lax.stop_gradient(scores), -jnp.inf)

    def choose(ranked):
        values, indices = jax.lax.top_k(ranked, k)
        return jnp.sort(indices, axis=-1), values[:, -1]

    return Chosen(*on_shards(choose, current_placement(), (1,), (1, 1))(ranked))


def portions(count: int, parts: int) -> tuple[int, ...]:
    """The numbers from 0 to `count` in `parts` equal steps, rounded up; ascending, without repetition."""
    return tuple(sorted({-(-count * part // parts) for part in range(parts + 1)}))


def lowered(cut: Float[Array, "*#B"], scale: float, dtype: jax.typing.DTypeLike) -> Float[Array, "*#B"]:
    """The cut minus the amount by which rounding may change a score, float32. Scores are compared with this value.

    Two programs that compute the same score, a training pass and a causal one, round it differently. The margin is
    2^-16 times the size of the cut, or times `scale` if that is larger: 128 units in the last place of float32, room
    for sums of 16,384 terms whose errors add up like a random walk. In bfloat16 the inputs of the score are rounded
    themselves: there the margin is 2^-8, half a unit in the last place. A missing cut (NaN) becomes -inf.
    """
    relative = max(2.0**-16, 0.5 * float(jnp.finfo(dtype).eps))
    size = jnp.where(jnp.isfinite(cut), jnp.maximum(jnp.abs(cut), scale), 0.0)
    return jnp.where(jnp.isnan(cut), -jnp.inf, cut - relative * size)


def on_any_device(count: Int[Array, ""]) -> Int[Array, ""]:
    """The largest count of any device of a user's `shard_map`, by which all of them take the same size: gradients of
    what they share are summed inside it, and devices in different ones would wait for each other."""
    axes = varying(count)
    return jax.lax.pmax(count, axes) if axes else count


def is_chosen(indices: Int[Array, "B k"], tokens: int) -> Bool[Array, "B T"]:
    """Whether each of the tokens is among the chosen ones."""
    return scattered(indices >= 0, indices, tokens)


def scattered(rows: Shaped[Array, "B k ..."], indices: Int[Array, "B k"], tokens: int) -> Shaped[Array, "B T ..."]:
    """An array of length `tokens` with the rows at their indices, and 0 elsewhere."""
    one = lambda own, at: jnp.zeros((tokens, *own.shape[1:]), own.dtype).at[at].set(own)  # noqa: E731
    # On an Explicit mesh the rows must be sharded like the indices; the `where` below makes them so.
    there = (indices >= 0).reshape(*indices.shape, *[1] * (rows.ndim - 2))
    return jax.vmap(one)(jnp.where(there, rows, jnp.zeros((), rows.dtype)), indices)
