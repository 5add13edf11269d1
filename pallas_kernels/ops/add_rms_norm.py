"""`add_rms_norm`: a residual addition and the normalised copy that the next branch reads, in one pass.

**Why this exists.** After a pre-norm sublayer, the stream and the branch's update are read, and the new stream and its
normalised copy are written: 4 tensors of `[N, D]`. As an addition, a row statistic and a product, this would read the
new stream once or twice more. The backward pass reads the stream and the gradients of the two outputs and writes one
gradient, again 4 tensors: the gradient of a sum is the same for both terms, and the gradient that flows down the stream
is added in the same pass. (XLA needs a separate pass for the gain's gradient.)

**Numerics.** Rows are read in their own dtype and everything until the store is float32: the sum is rounded once, and
the statistic is that of the rounded sum. The gradients of `gain` and `scale` are float32 sums over the rows in a fixed
order: block by block, then over blocks. They do not depend on scheduling, so equal runs give equal bits. `epsilon` is
inside the root, so a row of zeros has the finite gradient `d_total + weight * d_normed / sqrt(epsilon)`.

**Saved for the backward pass.** The summed stream, which the next sublayer keeps anyway. `1 / rms` is recomputed from
it: the backward pass reads the row anyway, and a column of one float32 per row is padded to 128 lanes on a TPU.

**Range.** Squares are summed in float32: rows of RMS beyond 1.8e19 / sqrt(D) overflow, as in any RMS norm.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.checks import as_scale, check_dtype, check_epsilon, check_float, check_shapes
from pallas_kernels.dispatch import ImplementationName, Op, run
from pallas_kernels.launch import RowKernel, rounded
from pallas_kernels.ops import by_rows


def add_rms_norm(
    stream: Float[Array, "*N D"],
    update: Float[Array, "*N D"],
    gain: Float[Array, " D"],
    scale: Float[Array, ""] | float = 1.0,
    *,
    epsilon: float = 1e-6,
    implementation: ImplementationName = None,
) -> tuple[Float[Array, "*N D"], Float[Array, "*N D"]]:
    """`stream' = stream + update` and `normed = scale * gain * stream' / sqrt(mean(stream'^2) + epsilon)`.

    Used by every pre-norm scheme: `scale = 1` is plain pre-norm, `scale = 1 / sqrt(b)` LayerNorm Scaling,
    b the number of the block.

    Args:
      stream: rows, bfloat16, float16 or float32; any D, one or more leading dimensions.
      update: the branch's output, same shape and dtype.
      gain: float32 `[D]`.
      scale: float32 scalar, traced or not, the same for all rows.
      epsilon: added to the mean square; a Python float.
      implementation: None (the best one for the platform), a name or names to try; see `dispatch.choose`.

    Returns:
      `(stream', normed)`, shaped and typed as `stream`. Differentiable in the first four arguments.

    Raises:
      ValueError: an argument other than the above, or no implementation supports these arguments.
    """
    scale = as_scale("add_rms_norm", scale, gain)
    row, vector = ("...", "D"), ("D",)
    shapes = {"stream": (stream, row), "update": (update, row), "gain": (gain, vector), "scale": (scale, ())}
    check_shapes("add_rms_norm", shapes)
    check_epsilon("add_rms_norm", epsilon)
    check_float("add_rms_norm", stream=stream)
    check_dtype("add_rms_norm", stream.dtype, update=update)
    check_dtype("add_rms_norm", jnp.float32, stream, gain=gain)
    # The kernels see one product [D]; outside of them, its gradient gives the gradients of both factors.
    return run(OP, implementation, stream, update, scale * gain, epsilon=epsilon)


def reference(
    stream: Float[Array, "N D"], update: Float[Array, "N D"], weight: Float[Array, " D"], *, epsilon: float
) -> tuple[Float[Array, "N D"], Float[Array, "N D"]]:
    """Statistics in float32 (float64 for float64 rows). They are those of the sum as it is stored, so that the norm is
    that of the stream which the next sublayer reads."""
    wide = jnp.promote_types(stream.dtype, jnp.float32)
    rows = rounded(stream.astype(wide) + update.astype(wide), stream.dtype)
    inverse_rms = lax.rsqrt(jnp.mean(rows * rows, axis=-1, keepdims=True) + epsilon)
    return rows.astype(stream.dtype), (weight.astype(wide) * (rows * inverse_rms)).astype(stream.dtype)


def _forward_body(block, rows, scalars, vectors, *, epsilon):
    (stream, update), (weight,) = rows, vectors
    total = block.stored(stream + update)
    inverse_rms = lax.rsqrt(block.sum(total * total) / block.width + epsilon)
    return (total, weight * (total * inverse_rms)), (), ()


def _backward_body(block, rows, scalars, vectors, *, epsilon):
    (total, d_total, d_normed), (weight,) = rows, vectors
    inverse_rms = lax.rsqrt(block.sum(total * total) / block.width + epsilon)
    scaled = inverse_rms * d_normed
    product = scaled * total
    pull = block.dot(product, weight) * inverse_rms * inverse_rms / block.width
    return (d_total + scaled * weight - pull * total,), (), (product,)


FORWARD = RowKernel("add_rms_norm", "forward", _forward_body, rows=2, outputs=2, vectors=1)
BACKWARD = RowKernel("add_rms_norm", "backward", _backward_body, rows=3, outputs=1, vectors=1, sums=1)


def _forward(rows_call, stream, update, weight, *, epsilon):
    outputs, _, _ = rows_call(FORWARD, (stream, update), vectors=(weight,), epsilon=epsilon)
    return outputs, ()


def _backward(rows_call, residuals, cotangents, *, epsilon):
    weight, total = residuals
    (d_sum,), _, (d_weight,) = rows_call(BACKWARD, (total, *cotangents), vectors=(weight,), epsilon=epsilon)
    return d_sum, d_sum, d_weight


OP = Op(
    "add_rms_norm",
    inputs=(1, 1, None),
    outputs=(1, 1),
    keep_inputs=(2,),
    keep_outputs=(0,),
    reference=reference,
    implementations=by_rows(_forward, _backward, FORWARD, BACKWARD),
)
