"""The Review Residuals update for XLA with a hand-written backward pass: what a CPU trains with.

**Why this exists.** Autodiff of the reference keeps the gate, its two arguments and the normalised rows for
the backward pass: five more `[N, D]` tensors per sublayer than the inputs. Here the inputs are all that is
kept.

**Numerics.** As the reference.

**Backend.** As in `add_rms_norm.xla`, row and column sums are taken of plain products, which XLA:CPU
vectorises.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.review_update import reference

PLATFORMS = None


def refusal(*args: Array, epsilon: float) -> str | None:
    return None


def forward(*args: Array, epsilon: float) -> tuple[tuple[Array, Array], tuple[()]]:
    """Outputs `(stream', normed)` of `reference.forward`; the backward pass reads the six arguments alone."""
    return reference.forward(*args, epsilon=epsilon), ()


def backward(
    residuals: tuple[Array, ...], cotangents: tuple[Array, Array], *, epsilon: float
) -> tuple[Float[Array, "N D"], ...]:
    """Gradients of the four `[N, D]` arguments in their dtype, then of `bias` and `weight`, float32 `[D]`."""
    stream, *_, bias, weight = residuals
    dtype, width = stream.dtype, stream.shape[-1]
    wide = jnp.promote_types(dtype, jnp.float32)
    h, u, a, c, d_total, d_normed = (x.astype(wide) for x in (*residuals[:4], *cotangents))
    per_h, per_u = reference.inverse_rms(h, epsilon), reference.inverse_rms(u, epsilon)
    gate = jax.nn.sigmoid(per_h * a + per_u * c + bias.astype(wide))
    rows = (h + gate * u).astype(dtype).astype(wide)

    per_row = reference.inverse_rms(rows, epsilon)
    scaled = per_row * d_normed
    product = scaled * rows
    along = jnp.dot(product, weight.astype(wide), precision=lax.Precision.HIGHEST)[:, None]
    d_rows = d_total + scaled * weight.astype(wide) - (along * per_row * per_row / width) * rows

    d_logit = d_rows * u * (gate * (1 - gate))
    pull_h = jnp.sum(d_logit * a, axis=-1, keepdims=True) * per_h * per_h * per_h / width
    pull_u = jnp.sum(d_logit * c, axis=-1, keepdims=True) * per_u * per_u * per_u / width
    d_inputs = (d_rows - pull_h * h, d_rows * gate - pull_u * u, per_h * d_logit, per_u * d_logit)
    return *(x.astype(dtype) for x in d_inputs), jnp.sum(d_logit, axis=0), jnp.sum(product, axis=0)
