"""Logit lens: the head's predictions from the residual at an earlier depth. Losses in nats."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float


def lens_divergence(logits: Float[Array, "*n V"], last: Float[Array, "*n V"]) -> Float[Array, " *n"]:
    """`KL(p_l || p_L)` in nats, p = softmax(logits), between the prediction at depth l and the model's own (logit lens,
    nostalgebraist 2020; as in Csordas et al. 2025, arXiv:2505.13898)."""
    early, final = jax.nn.log_softmax(logits.astype(jnp.float32)), jax.nn.log_softmax(last.astype(jnp.float32))
    return optax.losses.kl_divergence_with_log_targets(final, early)


def top_overlap(logits: Float[Array, "*n V"], last: Float[Array, "*n V"], top: int = 5) -> Float[Array, " *n"]:
    """Share of the model's `top` most likely tokens that are also among the `top` at depth l (arXiv:2505.13898)."""
    top = min(top, last.shape[-1])
    early, final = jax.lax.top_k(logits, top)[1], jax.lax.top_k(last, top)[1]
    found = jnp.any(early[..., :, None] == final[..., None, :], axis=-2)
    return jnp.mean(found.astype(jnp.float32), axis=-1)
