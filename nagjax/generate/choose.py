"""Choosing the next token from logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


class Sampling(NamedTuple):
    """What is drawn from, in this order: `logits / temperature`; of these the `top_k` likeliest tokens (0: all); of
    these, renormalised, the smallest set that holds `top_p`; of these the ones at least `min_p` times as likely as the
    likeliest."""

    temperature: Float[Array, ""] | float = 1.0
    top_k: Int[Array, ""] | int = 0
    top_p: Float[Array, ""] | float = 1.0
    min_p: Float[Array, ""] | float = 0.0


def nucleus(
    logits: Float[Array, "B V"], top_p: Float[Array, ""], top_k: Int[Array, ""] | int = 0
) -> tuple[Int[Array, "B V"], Bool[Array, "B V"]]:
    """Token ids from the likeliest to the unlikeliest, and which of them are in: of the `top_k` likeliest (0: of all)
    the smallest set whose probabilities sum to at least `top_p`, above 0 and up to 1.

    The token that crosses `top_p` is in the set, so the likeliest always is; of equally likely tokens the
    lower id comes first. Holtzman et al. 2020, arXiv:1904.09751, Eq. 2; Fan et al. 2018, arXiv:1805.04833. Float32.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1).astype(jnp.float32)
    first = jnp.arange(logits.shape[-1]) < jnp.where(top_k > 0, top_k, logits.shape[-1])
    likely = jax.nn.softmax(jnp.where(first, ranked, -jnp.inf), axis=-1)
    ahead = jnp.pad(jnp.cumsum(likely[:, :-1], axis=-1), ((0, 0), (1, 0)))
    return order, first & ((ahead < top_p) | (top_p >= 1.0))  # a rounded sum may reach 1 early


def choose(logits: Float[Array, "B V"], keys: Key[Array, " B"], sampling: Sampling) -> Int[Array, " B"]:
    """One token per row, int32: the likeliest at temperature 0, else drawn as `sampling` says, in float32.

    `keys` has one key per row, so that what a row draws does not depend on the rows beside it. `min_p`: Nguyen et al.
    2024, arXiv:2407.01082.
    """
    draw = jax.vmap(jax.random.categorical)
    temperature, top_k, top_p, min_p = sampling

    def from_sorted(scaled, likely):
        order, inside = nucleus(scaled, top_p, top_k)
        ranked, likely = (jnp.take_along_axis(x, order, axis=-1) for x in (scaled, likely))
        place = draw(keys, _only(ranked, inside & likely))
        return jnp.take_along_axis(order, place[:, None], axis=-1)[:, 0]

    def warm(logits):
        # With the maximum at 0 a tiny temperature makes -inf of the others, which is right, and never nan.
        scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
        sorts = (top_p < 1.0) | (top_k > 0)
        # What min_p leaves out has no say in top_p: it is left out of the draw, after the nucleus is known.
        likely = scaled >= jnp.log(min_p)
        return jax.lax.cond(sorts, lambda: from_sorted(scaled, likely), lambda: draw(keys, _only(scaled, likely)))

    def greedy(logits):
        return jnp.argmax(logits, axis=-1)

    return jax.lax.cond(temperature > 0.0, warm, greedy, logits.astype(jnp.float32)).astype(jnp.int32)


def _only(logits: Float[Array, "B V"], inside: Bool[Array, "B V"]) -> Float[Array, "B V"]:
    return jnp.where(inside, logits, -jnp.inf)
