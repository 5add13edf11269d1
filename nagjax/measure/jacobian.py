"""How far a map of residuals is from doing nothing, and how much each depth adds along a path."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from nagjax.measure.norms import norm


def identity_distance(
    f: Callable[[Array], Array], h: Float[Array, "*n D"], key: PRNGKeyArray, samples: int = 1
) -> Float[Array, " *n"]:
    """Estimate of `||J - I||_F^2 / D`, `J = df/dh`, by row: the mean of `||J^T v - v||^2` over random unit rows v.

    Its mean over tokens, and then the square root, is the distance of a block's Jacobian to the identity (Sun et al.
    2025, arXiv:2502.05795, Fig. 5 shows J itself). The transpose has the same norm, and the fused kernels have reverse
    derivatives only. Where a row of f depends on other rows of h, those parts of J count too. Unbiased.
    """
    value, back = jax.vjp(f, h)

    def one(key):
        v = jax.random.normal(key, value.shape, jnp.float32)
        v = v / norm(v)[..., None]
        return norm(back(v.astype(value.dtype))[0].astype(jnp.float32) - v) ** 2

    return jnp.mean(jax.lax.map(one, jax.random.split(key, samples)), axis=0)


def integrated_gradients(
    f: Callable[[Array], Array], h: Float[Array, "*n D"], baseline: Float[Array, "*n D"], steps: int = 256
) -> Float[Array, "*n D"]:
    """`(h - b) * mean_k df/dh(b + (k - 1/2)/steps (h - b))` for a scalar f: sums to `f(h) - f(b)` as steps grow
    (Sundararajan et al. 2017, arXiv:1703.01365). Csordas et al. take 256 steps from the tokens' mean residual.
    """
    places = (jnp.arange(steps) + 0.5) / steps
    gradient = jax.grad(f)
    total = jax.lax.scan(
        lambda sum, a: (sum + gradient(baseline + a * (h - baseline)), None), jnp.zeros_like(h), places
    )
    return (h - baseline) * total[0] / steps
