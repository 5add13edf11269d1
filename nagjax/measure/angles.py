"""Angles between residuals of one token at different depths. `h` [L+1, ..., D] holds the residuals before every block
and after the last."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nagjax.measure.norms import TINY, cosine, norm


def angle(a: Float[Array, "*n D"], b: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """Angle in radians, in [0, pi], float32: `2 atan2(|a' - b'|, |a' + b'|)` of the unit vectors. It equals
    `arccos <a', b'>` but is exact at small angles (Kahan). Between the residuals before and after a sublayer it is the
    sublayer's turn, for NAG `arctan t`."""
    a, b = (x.astype(jnp.float32) / jnp.maximum(norm(x), TINY)[..., None] for x in (a, b))
    return 2.0 * jnp.arctan2(norm(a - b), norm(a + b))


def angular_distances(h: Float[Array, "L+1 N D"]) -> Float[Array, "L+1 L+1"]:
    """Angular distance between all pairs of depths, `d(l, m) = mean_n angle(h_l, h_m) / pi`, in [0, 1] (Gromov et al.
    2024, arXiv:2403.17887, who use the last token only)."""
    row = lambda one: jnp.mean(angle(one[None], h), axis=1) / jnp.pi  # noqa: E731
    return jax.lax.map(row, h)


def block_influence(h: Float[Array, "L+1 N D"]) -> Float[Array, " L"]:
    """`BI_l = 1 - mean_n cos(h_l, h_{l+1})`, in [0, 2] (Men et al. 2024, ShortGPT, arXiv:2403.03853)."""
    return 1.0 - jnp.mean(cosine(h[:-1], h[1:]), axis=-1)


def successive_update_angle(h: Float[Array, "L+1 *n D"]) -> Float[Array, "L-1 *n"]:
    """Angle in radians between `h_{l+1} - h_l` and `h_{l+2} - h_{l+1}` (Liu et al. 2026, arXiv:2602.05970): pi/2 if
    blocks write independently of each other, small if they discretise one smooth flow. NaN if one of the two blocks
    wrote nothing, such as a block that a token skips."""
    updates = h[1:] - h[:-1]
    wrote = jnp.any(updates != 0, axis=-1)
    return jnp.where(wrote[:-1] & wrote[1:], angle(updates[:-1], updates[1:]), jnp.nan)


def angle_to_end(h: Float[Array, "L+1 *n D"]) -> Float[Array, "L+1 *n"]:
    """Angle in radians between `h_l` and the last residual, before the final norm (arXiv:2602.05970)."""
    return angle(h, h[-1:])


def progress_to_end(h: Float[Array, "L+1 *n D"]) -> Float[Array, "L+1 *n"]:
    """`s_l = <h_l - h_0, h_L - h_0> / ||h_L - h_0||^2`: 0 at the start, 1 at the end (arXiv:2602.05970)."""
    h = h.astype(jnp.float32)
    way = h[-1:] - h[:1]
    return jnp.sum((h - h[:1]) * way, axis=-1) / jnp.maximum(jnp.sum(way**2, axis=-1), TINY)
