"""`review_update`: the gated addition of Review Residuals and the normalised copy that the next branch reads.

**Why this exists.** `r = sigmoid(W_h N(h) + W_u N(u) + b)`, `h' = h + r * u` (arXiv:2606.31859), N an RMSNorm without
gain. XLA computes the matmuls from the rows themselves, because `N(h) W = (h W) / rms(h)`: no normalised copy of stream
or update is ever written. The rest reads 4 tensors of `[N, D]` and writes 2; the backward pass reads the 4 inputs and
the gradients of the 2 outputs and writes 4 gradients: 10 tensors. There are three row sums forward and six backward,
most of which depend on an earlier one: a kernel keeps the rows on chip between them.

**Numerics.** Rows are read in their own dtype; the three row statistics, the gate and everything until the store are
float32. The new stream is rounded once, and its statistic is that of the rounded rows. The gradients of `bias`, `gain`
and `scale` are float32 sums over the rows in a fixed order: block by block, then over blocks.

**Saved for the backward pass.** The inputs. Statistics, gate and new stream are recomputed on chip.

**Range.** As in `add_rms_norm`: rows of RMS beyond 1.8e19 / sqrt(D) overflow.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.checks import as_scale, check_dtype, check_epsilon, check_float, check_shapes
from pallas_kernels.dispatch import ImplementationName, Op, run
from pallas_kernels.launch import RowKernel, rounded
from pallas_kernels.ops import by_rows


def review_update(
    stream: Float[Array, "*N D"],
    update: Float[Array, "*N D"],
    gate_state: Float[Array, "*N D"],
    gate_update: Float[Array, "*N D"],
    bias: Float[Array, " D"],
    gain: Float[Array, " D"],
    scale: Float[Array, ""] | float = 1.0,
    *,
    epsilon: float = 1e-5,
    implementation: ImplementationName = None,
) -> tuple[Float[Array, "*N D"], Float[Array, "*N D"]]:
    """`stream' = stream + r * update` and `normed = scale * gain * stream' / |stream'|`.

    `r = sigmoid(gate_state / |stream| + gate_update / |update| + bias)` with `|x| = sqrt(mean(x^2) + epsilon)` per row;
    `gate_state = stream @ W_h` and `gate_update = update @ W_u` make it the gate of Review Residuals.

    Args:
      stream: rows, bfloat16, float16 or float32; any D, one or more leading dimensions.
      update, gate_state, gate_update: same shape and dtype as `stream`.
      bias, gain: float32 `[D]`.
      scale: float32 scalar, traced or not, the same for all rows.
      epsilon: added to all three mean squares; a Python float.
      implementation: None (the best one for the platform), a name or names to try; see `dispatch.choose`.

    Returns:
      `(stream', normed)`, shaped and typed as `stream`. Differentiable in the first seven arguments.

    Raises:
      ValueError: an argument other than the above, or no implementation supports these arguments.
    """
    rows = {"stream": stream, "update": update, "gate_state": gate_state, "gate_update": gate_update}
    vectors = {"bias": bias, "gain": gain}
    scale = as_scale("review_update", scale, gain)
    shapes = {name: (x, ("...", "D")) for name, x in rows.items()}
    shapes |= {name: (x, ("D",)) for name, x in vectors.items()}
    check_shapes("review_update", shapes | {"scale": (scale, ())})
    check_epsilon("review_update", epsilon)
    check_float("review_update", stream=stream)
    check_dtype("review_update", stream.dtype, **rows)
    check_dtype("review_update", jnp.float32, stream, **vectors)
    # The kernels see one product [D]; outside of them, its gradient gives the gradients of both factors.
    return run(OP, implementation, *rows.values(), bias, scale * gain, epsilon=epsilon)


def reference(
    stream: Float[Array, "N D"],
    update: Float[Array, "N D"],
    gate_state: Float[Array, "N D"],
    gate_update: Float[Array, "N D"],
    bias: Float[Array, " D"],
    weight: Float[Array, " D"],
    *,
    epsilon: float,
) -> tuple[Float[Array, "N D"], Float[Array, "N D"]]:
    """Everything between reading and writing is float32 (float64 for float64 rows); the norm is that of the new stream
    as it is stored."""
    wide = jnp.promote_types(stream.dtype, jnp.float32)
    h, u = stream.astype(wide), update.astype(wide)
    from_state = _inverse_rms(h, epsilon) * gate_state.astype(wide)
    from_update = _inverse_rms(u, epsilon) * gate_update.astype(wide)
    gate = jax.nn.sigmoid(from_state + from_update + bias.astype(wide))
    rows = rounded(h + gate * u, stream.dtype)
    normed = weight.astype(wide) * (rows * _inverse_rms(rows, epsilon))
    return rows.astype(stream.dtype), normed.astype(stream.dtype)


def _inverse_rms(rows: Float[Array, "N D"], epsilon: float) -> Float[Array, "N 1"]:
    return lax.rsqrt(jnp.mean(rows * rows, axis=-1, keepdims=True) + epsilon)


def _per_row(block, rows, epsilon):
    return lax.rsqrt(block.sum(rows * rows) / block.width + epsilon)


def _gated(block, stream, update, gate_state, gate_update, bias, epsilon):
    per_h, per_u = _per_row(block, stream, epsilon), _per_row(block, update, epsilon)
    gate = jax.nn.sigmoid(per_h * gate_state + per_u * gate_update + bias)
    total = block.stored(stream + gate * update)
    return total, gate, per_h, per_u, _per_row(block, total, epsilon)


def _forward_body(block, rows, scalars, vectors, *, epsilon):
    bias, weight = vectors
    total, *_, per_total = _gated(block, *rows, bias, epsilon)
    return (total, weight * (total * per_total)), (), ()


def _backward_body(block, rows, scalars, vectors, *, epsilon):
    *inputs, d_total, d_normed = rows
    stream, update, gate_state, gate_update = inputs
    (bias, weight), width = vectors, block.width
    total, gate, per_h, per_u, per_total = _gated(block, *inputs, bias, epsilon)

    along = block.dot(per_total * d_normed * total, weight)
    d_rows = d_total + per_total * d_normed * weight - (along * per_total * per_total / width) * total

    d_logit = d_rows * update * (gate * (1 - gate))
    pull_h = block.sum(d_logit * gate_state) * per_h * per_h * per_h / width
    pull_u = block.sum(d_logit * gate_update) * per_u * per_u * per_u / width
    gradients = (d_rows - pull_h * stream, d_rows * gate - pull_u * update, per_h * d_logit, per_u * d_logit)
    return gradients, (), (d_logit, per_total * d_normed * total)


SIZES = dict(vectors=2, transcendentals=1)
FORWARD = RowKernel("review_update", "forward", _forward_body, rows=4, outputs=2, **SIZES)
BACKWARD = RowKernel("review_update", "backward", _backward_body, rows=6, outputs=4, sums=2, **SIZES)


def _forward(rows_call, *inputs, epsilon):
    outputs, _, _ = rows_call(FORWARD, inputs[:4], vectors=inputs[4:], epsilon=epsilon)
    return outputs, ()


def _backward(rows_call, residuals, cotangents, *, epsilon):
    rows, vectors = (*residuals[:4], *cotangents), residuals[4:]
    gradients, _, sums = rows_call(BACKWARD, rows, vectors=vectors, epsilon=epsilon)
    return *gradients, *sums


OP = Op(
    "review_update",
    inputs=(1, 1, 1, 1, None, None),
    outputs=(1, 1),
    keep_inputs=(0, 1, 2, 3, 4, 5),
    reference=reference,
    implementations=by_rows(_forward, _backward, FORWARD, BACKWARD),
)
