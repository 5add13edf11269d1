"""Residual add and RMS norm for XLA with a hand-written backward pass: what a CPU trains with.

**Why this exists.** Autodiff of the reference keeps the normalised rows and their inverse RMS for the
backward pass and reads them again. Here the backward pass needs the summed stream alone.

**Numerics.** As the reference. `epsilon` sits inside the root, so a row of zeros has gradient
`weight * d_normed / sqrt(epsilon)`, which is finite.

**Backend.** XLA:CPU runs its vectorised row and column sums only on plain products, so no per-row or
per-column factor is broadcast inside a sum: `scaled = d_normed / rms` is formed once and serves the gain
gradient, the row product (a matrix-vector product with `weight`) and the result.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm import reference

PLATFORMS = None


def refusal(*args: Array, epsilon: float) -> str | None:
    return None


def forward(
    stream: Float[Array, "N D"], update: Float[Array, "N D"], weight: Float[Array, "D"], *, epsilon: float
) -> tuple[tuple[Array, Array], tuple[()]]:
    """Outputs `(stream', normed)`; nothing more is saved."""
    return reference.forward(stream, update, weight, epsilon=epsilon), ()


def backward(
    residuals: tuple[Array, Array], cotangents: tuple[Array, Array], *, epsilon: float
) -> tuple[Float[Array, "N D"], Float[Array, "N D"], Float[Array, "D"]]:
    """Gradients of stream and update (one `[N, D]` array for both) and of `weight`, float32."""
    (weight, total), (d_total, d_normed) = residuals, cotangents
    wide = jnp.promote_types(total.dtype, jnp.float32)
    rows = total.astype(wide)
    inverse_rms = lax.rsqrt(jnp.mean(rows * rows, axis=-1) + epsilon)
    scaled = inverse_rms[:, None] * d_normed.astype(wide)
    product = scaled * rows
    along = jnp.dot(product, weight.astype(wide), precision=lax.Precision.HIGHEST)
    pull = along * inverse_rms * inverse_rms / rows.shape[-1]
    d_sum = (d_total.astype(wide) + scaled * weight.astype(wide) - pull[:, None] * rows).astype(total.dtype)
    return d_sum, d_sum, jnp.sum(product, axis=0)
