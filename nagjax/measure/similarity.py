"""Similarity of two sets of residuals, and the effective dimension of one set. Rows are tokens."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from nagjax.measure.norms import TINY


def linear_cka(x: Float[Array, "N D"], y: Float[Array, "N E"]) -> Float[Array, ""]:
    """`||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F)` of column-centred X and Y, in [0, 1]; 1 if they are equal up to
    rotation and one scale (Kornblith et al. 2019, arXiv:1905.00414, Section 3)."""
    x, y = _centred(x), _centred(y)
    size = lambda a, b: jnp.sqrt(jnp.sum((a.T @ b) ** 2))  # noqa: E731
    return size(y, x) ** 2 / jnp.maximum(size(x, x) * size(y, y), TINY)


def cka_matrix(h: Float[Array, "L N D"]) -> Float[Array, "L L"]:
    """`linear_cka` between all pairs, computed by `||Y^T X||_F^2 = <X X^T, Y Y^T>`."""
    h = _centred(h)
    grams = jnp.einsum("lnd,lmd->lnm", h, h).reshape(len(h), -1)
    size = jnp.sqrt(jnp.sum(grams**2, axis=-1))
    return (grams @ grams.T) / jnp.maximum(jnp.outer(size, size), TINY)


def _centred(h: Float[Array, "*L N D"]) -> Float[Array, "*L N D"]:
    """float32, with columns of mean 0, and of RMS 1 in all: else fourth powers may underflow or overflow."""
    h = h.astype(jnp.float32)
    h = h - jnp.mean(h, axis=-2, keepdims=True)
    return h / jnp.maximum(jnp.sqrt(jnp.mean(h**2, axis=(-2, -1), keepdims=True)), TINY)


def effective_rank(x: Float[Array, "N D"]) -> Float[Array, ""]:
    """`exp(-sum p_i log p_i)`, `p_i = s_i / sum s` over singular values: between 1 and min(N, D) (Roy & Vetterli 2007,
    "The effective rank", Eq. 1-4)."""
    values = jnp.linalg.svd(x.astype(jnp.float32), compute_uv=False)
    share = values / jnp.maximum(jnp.sum(values), TINY)
    return jnp.exp(-jnp.sum(jnp.where(share > 0, share * jnp.log(jnp.maximum(share, TINY)), 0.0)))


def stable_rank(x: Float[Array, "N D"]) -> Float[Array, ""]:
    """`||X||_F^2 / ||X||_2^2`, between 1 and min(N, D) (Rudelson & Vershynin 2007)."""
    values = jnp.linalg.svd(x.astype(jnp.float32), compute_uv=False)
    return jnp.sum(values**2) / jnp.maximum(values[0] ** 2, TINY)


def linear_map_error(h: Float[np.ndarray, "N D"], other: Float[np.ndarray, "N E"]) -> float:
    """`min_W ||h - other W||_F / ||h||_F` by least squares, in [0, 1]; 0 if `h` is a linear function of another model's
    residual `other` of the same tokens (Csordas et al. 2025, arXiv:2505.13898). Needs more tokens than E."""
    h, other = np.asarray(h, np.float64), np.asarray(other, np.float64)
    fitted = other @ np.linalg.lstsq(other, h, rcond=None)[0]
    return float(np.linalg.norm(h - fitted) / max(np.linalg.norm(h), TINY))
