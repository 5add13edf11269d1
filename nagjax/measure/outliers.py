"""Outlier features, and tokens that attract attention (sinks)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from nagjax.measure.norms import TINY

SINK = 0.3  # a head with more than this attention on a document's first token has a sink


def kurtosis(h: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """`E[(x - mu)^4] / E[(x - mu)^2]^2` over features: 3 for a normal distribution, about D for a single spike."""
    x = h.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1.0)  # otherwise fourth powers may underflow or overflow
    square = jnp.mean(x**2, axis=-1)
    return jnp.mean(x**4, axis=-1) / jnp.maximum(square**2, TINY)


def massive_ratio(h: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """`max |h| / median |h|` over features (Sun et al. 2024, Massive Activations, arXiv:2402.17762, who call an
    activation massive if this is above 1000 and max |h| above 100)."""
    size = jnp.abs(h.astype(jnp.float32))
    return jnp.max(size, axis=-1) / jnp.maximum(jnp.median(size, axis=-1), TINY)


def peak(h: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """`max |x - mu| / sd` over features: the largest deviation in standard deviations, at most sqrt(D - 1)."""
    x = h.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return jnp.max(jnp.abs(x), axis=-1) / jnp.sqrt(jnp.maximum(jnp.mean(x**2, axis=-1), TINY))


def offset(h: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """`|mu| / sd` over features: 0 if the features are centred on zero."""
    x = h.astype(jnp.float32)
    return jnp.abs(jnp.mean(x, axis=-1)) / jnp.sqrt(jnp.maximum(jnp.var(x, axis=-1), TINY))


def first_token_attention(
    weights: Float[Array, "B H T T"], first: Bool[Array, "B T"], counted: Bool[Array, "B T"]
) -> Float[Array, " H"]:
    """`alpha_1` of each head: the mean attention of the counted queries to first tokens. `weights` are softmax
    attention, zero where a query may not attend (Gu et al. 2024, arXiv:2410.10781, Section 3)."""
    given = jnp.einsum("bhqk,bk->bhq", weights.astype(jnp.float32), first.astype(jnp.float32), precision="highest")
    counted = counted.astype(jnp.float32)[:, None]
    return jnp.sum(given * counted, axis=(0, 2)) / jnp.maximum(jnp.sum(counted), 1.0)


def sink_rate(alpha: Float[Array, "*n H"], threshold: float = SINK) -> Float[Array, ""]:
    """Share of the heads whose `alpha_1` is above the threshold: the paper's Sink metric for the first token
    (arXiv:2410.10781, threshold 0.3)."""
    return jnp.mean((alpha > threshold).astype(jnp.float32))
