"""The NAG modulator: computes from a row's direction how far the row is rotated.

    z = r W + b        x = sum_c p_c sigmoid(z_c),  p = softmax(logits)        t = alpha max(x, 1e-6) ** beta

Everything is float32 (float64 for float64 rows). The mixture is clamped before the power: x ** beta has no
finite derivative at 0. Scalars per row are `[N, 1]`, so the same lines run in XLA and inside a kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.launch import rounded

LEAST_MIXTURE = 1e-6


class Turn(NamedTuple):
    """Results of the gate, for N rows."""

    gates: Float[Array, "N C"]
    mixture: Float[Array, "N 1"]
    log_mixture: Float[Array, "N 1"]
    modulation: Float[Array, "N 1"]
    turn: Float[Array, "N 1"]


class GateGradients(NamedTuple):
    """Gradients per row, of z, of `shares` (p), beta and alpha. Those of the last three are still to be summed over the
    rows."""

    z: Float[Array, "N C"]
    shares: Float[Array, "N C"]
    beta: Float[Array, "N 1"]
    alpha: Float[Array, "N 1"]


def turn(z: Float[Array, "N C"], shares: Float[Array, "1 C"], beta, alpha) -> Turn:
    """The gate's results, from the projections z and the shares p = softmax(logits)."""
    gates = jax.nn.sigmoid(z)
    mixture = jnp.sum(gates * shares, axis=1, keepdims=True)
    log_mixture = jnp.log(jnp.maximum(mixture, LEAST_MIXTURE))
    modulation = jnp.exp(beta * log_mixture)
    return Turn(gates, mixture, log_mixture, modulation, alpha * modulation)


def gradients(state: Turn, shares, beta, alpha, dt: Float[Array, "N 1"]) -> GateGradients:
    """The gate's gradients, from dt, the gradient of the turn."""
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
    """The gradient of the logits, from the gradient of the shares."""
    return shares * (d_shares - jnp.sum(shares * d_shares))


def product(a: Float[Array, "N K"], b: Float[Array, "K M"]) -> Float[Array, "N M"]:
    """a b in float32, for float32 b. For bfloat16 a it takes two bfloat16 matmuls, otherwise full precision."""
    if a.dtype != jnp.bfloat16:
        return jnp.dot(a.astype(jnp.promote_types(a.dtype, jnp.float32)), b, precision="highest")
    return product_of_halves(a, jnp.concatenate(split(b), axis=1))


def product_of_halves(a: Float[Array, "N K"], halves: Float[Array, "K 2*M"]) -> Float[Array, "N M"]:
    """a (h + l) in float32, for bfloat16 a, and h and l side by side in `halves`."""
    high, low = jnp.split(jnp.dot(a, halves, preferred_element_type=jnp.float32), 2, axis=1)
    return high + low


def dot_on_chip(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """The product of two matrices inside a kernel, in float32, summed over the axes `contract` (of a, of b)."""
    precision = "highest" if a.dtype == jnp.float32 else "default"
    axes = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision, preferred_element_type=jnp.float32)


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32 array as the sum of two bfloat16 arrays, exact to 16 bits; for use outside of kernels."""
    high = rounded(x, jnp.bfloat16)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def split_on_chip(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`split` inside a kernel, where compilers keep both conversions."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
