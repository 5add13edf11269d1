"""Health of NAG's modulators, the gates that set how far each sublayer rotates the residual."""

import jax.numpy as jnp
from jaxtyping import Array, Float

DEAD = 0.05  # mean |t| below which a sublayer counts as dead
CLOSED, OPEN = 0.05, 0.95


def health(
    turn: Float[Array, "*n"], modulator: Float[Array, "*n"], counted: Float[Array, "*n"]
) -> dict[str, Float[Array, ""]]:
    """Health of one sublayer's modulator over tokens of weight `counted`; `turn` is t = alpha m, the tangent of the
    angle, m in [0, 1] (Figliolia & Millidge 2026, arXiv:2606.16112, Eq. 13-16).

    turn: mean |t|. modulator: mean m. spread: standard deviation of m over tokens; 0 means that the gate ignores its
    token. closed, open: shares of the tokens with m below 0.05 and above 0.95. dead: 1 if mean |t| < 0.05, else 0.
    """
    total = jnp.sum(counted)
    counted = counted / jnp.where(total > 0, total, 1.0)
    mean = lambda x: jnp.sum(counted * x.astype(jnp.float32))  # noqa: E731
    average, size = mean(modulator), mean(jnp.abs(turn))
    return {
        "turn": size,
        "modulator": average,
        "spread": jnp.sqrt(mean((modulator - average) ** 2)),
        "closed": mean(modulator < CLOSED),
        "open": mean(modulator > OPEN),
        "dead": (size < DEAD).astype(jnp.float32),
    }
