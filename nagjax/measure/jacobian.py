"""Distance of a block's Jacobian from the identity, and integrated gradients."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from nagjax.measure.norms import norm


def identity_distance(
    f: Callable[[Array], Array], h: Float[Array, "*n D"], key: PRNGKeyArray, samples: int = 1
) -> Float[Array, " *n"]:
    """Unbiased estimate of `||J - I||_F^2 / D` per row, `J = df/dh`: the mean of `||J^T v - v||^2` over random unit
    rows v.

    The square root of its mean over tokens is the distance of a block's Jacobian from the identity (Sun et al. 2025,
    arXiv:2502.05795, Fig. 5 shows J itself). J^T has the same norm, and the fused kernels only have reverse-mode
    derivatives. If a row of f depends on other rows of h, those parts of J count too.
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
    """`(h - b) * mean_k df/dh(b + (k - 1/2)/steps (h - b))` for a scalar f. Its sum approaches `f(h) - f(b)` with more
    steps (Sundararajan et al. 2017, arXiv:1703.01365). Csordas et al. take 256 steps from the tokens' mean residual.
    """
    places = (jnp.arange(steps) + 0.5) / steps
    gradient = jax.grad(f)
    total = jax.lax.scan(
        lambda sum, a: (sum + gradient(baseline + a * (h - baseline)), None), jnp.zeros_like(h), places
    )
    return (h - baseline) * total[0] / steps
