"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


def nucleus(logits: Float[Array, "B V"], top_p: Float[Array, ""]) -> tuple[Int[Array, "B V"], Bool[Array, "B V"]]:
    """Token ids from the likeliest to the unlikeliest, and which of them are in: the smallest set whose
    probabilities sum to at least `top_p`, above 0 and below 1.

    The token that crosses `top_p` is in the set, so the likeliest always is; of equally likely tokens the
    lower id comes first. Holtzman et al. 2020, arXiv:1904.09751, Eq. 2. Float32.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    likely = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1).astype(jnp.float32), axis=-1)
    ahead = jnp.pad(jnp.cumsum(likely[:, :-1], axis=-1), ((0, 0), (1, 0)))
    return order, ahead < top_p


def choose(
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
) -> Int[Array, " B"]:
    """One token per row, int32: the likeliest at temperature 0, else drawn from the nucleus of
    `logits / temperature` (from all tokens where `top_p` is 1), in float32.

    `keys` has one key per row, so that what a row draws does not depend on the rows beside it.
    """
    draw = jax.vmap(jax.random.categorical)

    def from_all(scaled):
        return draw(keys, scaled)

    def from_nucleus(scaled):
        order, inside = nucleus(scaled, top_p)
        place = draw(keys, jnp.where(inside, jnp.take_along_axis(scaled, order, axis=-1), -jnp.inf))
        return jnp.take_along_axis(order, place[:, None], axis=-1)[:, 0]

    def warm(logits):
        # With the maximum at 0 a tiny temperature makes -inf of the others, which is right, and never nan.
        scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
        return jax.lax.cond(top_p < 1.0, from_nucleus, from_all, scaled)

    def greedy(logits):
        return jnp.argmax(logits, axis=-1)

    return jax.lax.cond(temperature > 0.0, warm, greedy, logits.astype(jnp.float32)).astype(jnp.int32)
