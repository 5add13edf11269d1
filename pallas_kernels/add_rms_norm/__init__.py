"""`add_rms_norm`: a residual add and the normalised copy that the next branch reads, in one pass.

**Why this exists.** At the boundary of a pre-norm sublayer the stream and the branch's update are read, the
new stream and its normalised copy are written: 4 tensors of `[N, D]`. Done as an addition, a row statistic
and a product, the new stream is read once or twice more. The backward pass reads the stream and the gradients
of the two outputs and writes one gradient, again 4 tensors: the gradient of a sum is the same for both terms,
and the gradient that flows down the stream is added in the same pass.

**Numerics.** Rows are read in their own dtype and everything until the store is float32: the sum is rounded
once, and the statistic is of the rounded sum. The gradients of `gain` and `scale` are float32 sums over the
rows in a fixed order: block by block, then over blocks. They do not depend on scheduling, so equal runs give
equal bits.

**Saved for the backward pass.** The summed stream, which the next sublayer holds anyway. `1 / rms` is
computed again from it: the backward pass has the row at hand, and a column of one float32 per row is padded
to 128 lanes on a TPU.

**Range.** Squares are summed in float32: rows of RMS beyond 1e18 overflow, as in any RMS norm.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.checks import check_dtype, check_float, check_shapes, refuse_argument
from pallas_kernels.dispatch import Implementation, Op, run

OP = Op(
    package=__name__,
    inputs=(1, 1, None),
    outputs=(1, 1),
    keep_inputs=(2,),
    keep_outputs=(0,),
    implementations=("xla", "mosaic_tpu", "pallas_triton", "triton"),
)


def add_rms_norm(
    stream: Float[Array, "*N D"],
    update: Float[Array, "*N D"],
    gain: Float[Array, " D"],
    scale: Float[Array, ""] | float = 1.0,
    *,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*N D"], Float[Array, "*N D"]]:
    """`stream' = stream + update` and `normed = scale * gain * stream' / sqrt(mean(stream'^2) + epsilon)`.

    The boundary of every pre-norm scheme: `scale = 1` is the plain one, `scale = 1 / sqrt(l)` LayerNorm
    Scaling.

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
      ValueError: a shape or dtype other than the above, or no implementation takes these arguments.
    """
    scale = jnp.asarray(scale, gain.dtype if hasattr(gain, "dtype") else jnp.float32)
    check_shapes(
        "add_rms_norm",
        {
            "stream": (stream, ("...", "D")),
            "update": (update, ("...", "D")),
            "gain": (gain, ("D",)),
            "scale": (scale, ()),
        },
    )
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        refuse_argument("add_rms_norm", "epsilon", epsilon, "a Python float between 0 and 1")
    check_float("add_rms_norm", stream=stream)
    check_dtype("add_rms_norm", stream.dtype, update=update)
    check_dtype("add_rms_norm", jnp.float32, gain=gain)
    # One [D] product outside the kernels gives the gradients of both factors from the kernel's one.
    return run(OP, implementation, stream, update, scale * gain, epsilon=epsilon)
