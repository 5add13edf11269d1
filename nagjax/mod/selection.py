"""Choosing tokens by score, with static shapes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from nagjax.layers.where import Where
from pallas_kernels.placement import current_placement, on_shards


class Chosen(NamedTuple):
    """The chosen tokens of each sequence in their original order, and the score of the last one let in: -inf where
    a sequence has fewer than k tokens."""

    indices: Int[Array, "B k"]
    cut: Float[Array, " B"]


def top_tokens(scores: Float[Array, "B T"], where: Where, k: int) -> Chosen:
    """The k highest scores of each sequence, exactly k: of equal scores the earlier token goes first. Copies of a token
    whose scores differ by rounding alone are ranked by it, so that another mesh may choose another of them.

    Padding is chosen only when nothing else is left. Indices int32, sorted; nothing here has a gradient. Sequences
    are ranked where they live: XLA's GPU partitioner would gather all scores for a top-k.
    """
    ranked = jnp.where(where.segments > 0, jax.lax.stop_gradient(scores), -jnp.inf)

    def choose(ranked):
        values, indices = jax.lax.top_k(ranked, k)
        return jnp.sort(indices, axis=-1), values[:, -1]

    return Chosen(*on_shards(choose, current_placement(), (1,), (1, 1))(ranked))


def portions(count: int, parts: int) -> tuple[int, ...]:
    """From 0 to `count` in so many equal steps, rounded up; ascending, each once."""
    return tuple(sorted({-(-count * part // parts) for part in range(parts + 1)}))


def lowered(cut: Float[Array, "*#B"], scale: float, dtype: jax.typing.DTypeLike) -> Float[Array, "*#B"]:
    """The cut less what rounding may move a score by, float32: a score is compared with this.

    Two programs for one score, a training pass and a causal one, round it differently. The margin is 2^-16 of the
    cut's size, or of `scale` if that is more: 128 units in the last place of float32, room for sums of 16,384 terms
    whose errors add up like a random walk. In bfloat16 what the score is made from is itself rounded: there it is
    2^-8, half a unit in the last place. No cut (NaN) is as low as can be.
    """
    relative = max(2.0**-16, 0.5 * float(jnp.finfo(dtype).eps))
    size = jnp.where(jnp.isfinite(cut), jnp.maximum(jnp.abs(cut), scale), 0.0)
    return jnp.where(jnp.isnan(cut), -jnp.inf, cut - relative * size)


def is_chosen(indices: Int[Array, "B k"], tokens: int) -> Bool[Array, "B T"]:
    """Which tokens are among the chosen."""
    return scattered(indices >= 0, indices, tokens)


def scattered(rows: Shaped[Array, "B k ..."], indices: Int[Array, "B k"], tokens: int) -> Shaped[Array, "B T ..."]:
    """The rows at their indices, and 0 elsewhere."""
    one = lambda own, at: jnp.zeros((tokens, *own.shape[1:]), own.dtype).at[at].set(own)  # noqa: E731
    # On an Explicit mesh the rows have to be split as the indices are, which a `where` by them sees to.
    there = (indices >= 0).reshape(*indices.shape, *[1] * (rows.ndim - 2))
    return jax.vmap(one)(jnp.where(there, rows, jnp.zeros((), rows.dtype)), indices)
