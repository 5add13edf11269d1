"""Choosing the next token from logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


class Sampling(NamedTuple):
    """The distribution that a token is drawn from. The filters apply in this order: `logits / temperature`; the `top_k`
    likeliest tokens (0: all); of these, renormalised, the smallest set whose probability reaches `top_p`; of these, the
    tokens at least `min_p` times as likely as the likeliest."""

    temperature: Float[Array, ""] | float = 1.0
    top_k: Int[Array, ""] | int = 0
    top_p: Float[Array, ""] | float = 1.0
    min_p: Float[Array, ""] | float = 0.0


def nucleus(
    logits: Float[Array, "B V"], top_p: Float[Array, ""], top_k: Int[Array, ""] | int = 0
) -> tuple[Int[Array, "B V"], Bool[Array, "B V"]]:
    """Token ids in descending order of probability, int32, and which of them are in the nucleus: of the `top_k`
    likeliest (0: of all), the smallest set whose probabilities sum to at least `top_p` (above 0, at most 1).

    The token that crosses `top_p` is in the set, so the likeliest token always is; of equally likely tokens the one
    with the lower id comes first. Holtzman et al. 2020, arXiv:1904.09751, Eq. 2; Fan et al. 2018, arXiv:1805.04833.
    Computed in float32.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1).astype(jnp.float32)
    first = jnp.arange(logits.shape[-1]) < jnp.where(top_k > 0, top_k, logits.shape[-1])
    likely = jax.nn.softmax(jnp.where(first, ranked, -jnp.inf), axis=-1)
    ahead = jnp.pad(jnp.cumsum(likely[:, :-1], axis=-1), ((0, 0), (1, 0)))
    return order, first & ((ahead < top_p) | (top_p >= 1.0))  # by rounding, a sum may reach 1 early


def choose(logits: Float[Array, "B V"], keys: Key[Array, " B"], sampling: Sampling) -> Int[Array, " B"]:
    """One token per row, int32: at temperature 0 the likeliest, else drawn from the distribution `sampling`, in
    float32.

    `keys` has one key per row, so that a row's draw does not depend on the rows beside it. `min_p`: Nguyen et al. 2024,
    arXiv:2407.01082.
    """
    draw = jax.vmap(jax.random.categorical)
    temperature, top_k, top_p, min_p = sampling

    def from_sorted(scaled, likely):
        order, inside = nucleus(scaled, top_p, top_k)
        ranked, likely = (jnp.take_along_axis(x, order, axis=-1) for x in (scaled, likely))
        place = draw(keys, _only(ranked, inside & likely))
        return jnp.take_along_axis(order, place[:, None], axis=-1)[:, 0]

    def warm(logits):
        # Because the maximum is 0, a tiny temperature turns the others into -inf, which is right, and never makes a
        # NaN.
        scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
        sorts = (top_p < 1.0) | (top_k > 0)
        # Tokens that min_p leaves out still count towards top_p: they are left out after the nucleus is known.
        likely = scaled >= jnp.log(min_p)
        return jax.lax.cond(sorts, lambda: from_sorted(scaled, likely), lambda: draw(keys, _only(scaled, likely)))

    def greedy(logits):
        return jnp.argmax(logits, axis=-1)

    return jax.lax.cond(temperature > 0.0, warm, greedy, logits.astype(jnp.float32)).astype(jnp.int32)


def _only(logits: Float[Array, "B V"], inside: Bool[Array, "B V"]) -> Float[Array, "B V"]:
    return jnp.where(inside, logits, -jnp.inf)
