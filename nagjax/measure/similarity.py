"""Similarity of two sets of residuals, and the effective dimension of one set. Rows are tokens."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from nagjax.errors import UserError
from nagjax.measure.norms import TINY


def linear_cka(x: Float[Array, "N D"], y: Float[Array, "N E"]) -> Float[Array, ""]:
    """`<K, L> / (||K|| ||L||)` of the U-centred Gram matrices K of X and L of Y, in [-1, 1]: debiased linear CKA
    (Nguyen, Raghu & Kornblith 2021, arXiv:2010.15327). Each product is, up to a factor that cancels, the unbiased
    HSIC_1 of Song et al. 2012, "Feature Selection via Dependence Maximization", JMLR 13.

    1 if X and Y are equal up to rotation, shift and one scale. Around 0, so sometimes slightly below it, if they are
    unrelated; the biased estimate (Kornblith et al. 2019, arXiv:1905.00414) is then about `D / (D + N)`. NaN for fewer
    than 4 tokens.
    """
    return jnp.sum(_gram(x) * _gram(y))


def cka_matrix(h: Float[Array, "L N D"]) -> Float[Array, "L L"]:
    """`linear_cka` between all pairs of depths. Unrelated pairs may be slightly below 0; NaN for fewer than 4
    tokens."""
    grams = _gram(h)
    return jnp.einsum("lnm,knm->lk", grams, grams, precision="highest")


def _gram(h: Float[Array, "*L N D"]) -> Float[Array, "*L N N"]:
    """`X X^T` without its diagonal, U-centred (Szekely & Rizzo 2014, arXiv:1310.2926) and of norm 1. The product of two
    of these has no differences of large sums, unlike the usual form of HSIC_1."""
    tokens = h.shape[-2]
    if tokens < 4:
        return jnp.full((*h.shape[:-1], tokens), jnp.nan)
    h, others = _centred(h), ~jnp.eye(tokens, dtype=bool)
    gram = jnp.where(others, jnp.einsum("...nd,...md->...nm", h, h, precision="highest"), 0.0)
    rows = jnp.sum(gram, axis=-1, keepdims=True) / (tokens - 2)
    whole = jnp.sum(rows, axis=-2, keepdims=True) / (tokens - 1)
    gram = jnp.where(others, gram - rows - jnp.swapaxes(rows, -1, -2) + whole, 0.0)
    return gram / jnp.maximum(jnp.sqrt(jnp.sum(gram**2, axis=(-2, -1), keepdims=True)), TINY)


def _centred(h: Float[Array, "*L N D"]) -> Float[Array, "*L N D"]:
    """float32, with columns of mean 0, and an overall RMS of 1: otherwise fourth powers may underflow or overflow."""
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
    """`min_W ||h - other W||_F / ||h||_F` by least squares, in [0, 1]. It is 0 if `h` is a linear function of `other`,
    another model's residual of the same tokens (Csordas et al. 2025, arXiv:2505.13898). Raises UserError unless there
    are more tokens than E: otherwise every `h` is a linear function of `other`."""
    h, other = np.asarray(h, np.float64), np.asarray(other, np.float64)
    if len(other) <= other.shape[1]:
        raise UserError("other", other.shape, "give more tokens than features")
    fitted = other @ np.linalg.lstsq(other, h, rcond=None)[0]
    return float(np.linalg.norm(h - fitted) / max(np.linalg.norm(h), TINY))
