"""Losses and biases that keep experts evenly used, and measures of this, from the notes of `nagjax.layers.experts`.

f_i is the share of the tokens' choices that fell on expert i, P_i its mean share of the scores, n the number of a
token's options (experts and `skips`), x a token's router logits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nagjax.layers.config import MoEConfig

Notes = dict[str, Float[Array, "L ..."]]


def auxiliary_loss(notes: Notes, config: MoEConfig) -> Float[Array, ""]:
    """`load_weight n sum_i f_i P_i + z_weight mean(logsumexp(x)^2)`, summed over blocks, nats. Only P and x have a
    gradient. Load balance: Fedus et al. 2021, arXiv:2101.03961; z-loss: Zoph et al. 2022, arXiv:2202.08906."""
    tokens = jnp.maximum(notes["tokens"], 1.0)[:, None]
    share = jax.lax.stop_gradient(notes["load"]) / (config.active * tokens)
    even = config.choices * jnp.sum(share * notes["score"] / tokens, axis=-1)
    return config.load_weight * jnp.sum(even) + config.z_weight * jnp.sum(notes["z"] / tokens[:, 0])


def moved_biases(biases: Float[Array, "L n"], load: Float[Array, "L n"], rate: float) -> Float[Array, "L n"]:
    """The balancing biases after a step: raised by `rate` for experts chosen less often than on average, lowered for
    those chosen more often (Wang et al. 2024, arXiv:2408.15664, used by DeepSeek-V3, arXiv:2412.19437). load: number of
    choices that fell on each expert."""
    return biases + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


class Balance(NamedTuple):
    """How evenly the options were chosen, means over blocks: n times the largest and n times the smallest share of
    choices (1 if all are equal), the entropy over its largest possible value, and the share of choices that were
    dropped."""

    expert_max: Float[Array, ""]
    expert_min: Float[Array, ""]
    expert_entropy: Float[Array, ""]
    expert_dropped: Float[Array, ""]


def balance_of(notes: Notes) -> Balance:
    """The balance in a batch. Blocks whose MLP ran for no token do not count."""
    load, total = notes["load"], jnp.sum(notes["load"], axis=-1)
    some, n = total > 0, load.shape[-1]
    share = load / jnp.maximum(total, 1.0)[:, None]
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1) / jnp.log(float(max(n, 2)))
    mean = lambda values: jnp.sum(jnp.where(some, values, 0.0)) / jnp.maximum(jnp.sum(some), 1)  # noqa: E731
    dropped = notes["dropped"] / jnp.maximum(total, 1.0)
    return Balance(*map(mean, (n * jnp.max(share, axis=-1), n * jnp.min(share, axis=-1), entropy, dropped)))
