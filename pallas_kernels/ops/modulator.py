"""The NAG modulator: computes from a row's direction how far the row is rotated.

    z = r W + b        x = sum_c p_c sigmoid(z_c),  p = softmax(logits)        t = alpha max(x, 1e-6) ** beta

Everything is float32 (float64 for float64 rows). The mixture is clamped before the power: x ** beta has no
finite derivative at 0. Scalars per row are `[N, 1]`, so the same lines run in XLA and inside a kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LEAST_MIXTURE = 1e-6


class Turn(NamedTuple):
    """Results of the gate: `gates` `[N, C]`, the rest `[N, 1]`."""

    gates: Float[Array, "N C"]
    mixture: Float[Array, "N 1"]
    log_mixture: Float[Array, "N 1"]
    modulation: Float[Array, "N 1"]
    turn: Float[Array, "N 1"]


class GateGradients(NamedTuple):
    """Gradients per row: `z` `[N, C]`; `shares` (of p) `[N, C]`, `beta` and `alpha` `[N, 1]`, still to be summed over
    the rows."""

    z: Float[Array, "N C"]
    shares: Float[Array, "N C"]
    beta: Float[Array, "N 1"]
    alpha: Float[Array, "N 1"]


def turn(z: Float[Array, "N C"], shares: Float[Array, "1 C"], beta, alpha) -> Turn:
    """The gate's results, from the projections z and p = softmax(logits)."""
    gates = jax.nn.sigmoid(z)
    mixture = jnp.sum(gates * shares, axis=1, keepdims=True)
    log_mixture = jnp.log(jnp.maximum(mixture, LEAST_MIXTURE))
    modulation = jnp.exp(beta * log_mixture)
    return Turn(gates, mixture, log_mixture, modulation, alpha * modulation)


def gradients(state: Turn, shares, beta, alpha, dt: Float[Array, "N 1"]) -> GateGradients:
    """The gate's gradients, from the gradient of the turn."""
    per_log = alpha * dt * state.modulation
    clamped = jnp.maximum(state.mixture, LEAST_MIXTURE)
    d_mixture = jnp.where(state.mixture > LEAST_MIXTURE, beta * per_log / clamped, 0.0)
    slope = state.gates * (1 - state.gates)
    return GateGradients(
        d_mixture * shares * slope,
        d_mixture * state.gates,
        per_log * state.log_mixture,
        dt * state.modulation,
    )


def through_softmax(shares: Float[Array, " C"], d_shares: Float[Array, " C"]) -> Float[Array, " C"]:
    """The gradient of the logits."""
    return shares * (d_shares - jnp.sum(shares * d_shares))


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 as the sum of two bfloat16 numbers, exact to 16 bits."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
