"""`review_update`: the gated add of Review Residuals and the normalised copy that the next branch reads.

**Why this exists.** `r = sigmoid(W_h rms(h) + W_u rms(u) + b)`, `h' = h + r * u` (arXiv:2606.31859). The
matrix products stay with XLA, taken of the rows as they are, because `rms(h) W = (h W) / rms(h)`: no
normalised copy of stream or update is ever written. What is left reads 4 tensors of `[N, D]` and writes 2;
the backward pass reads the 4 inputs and the gradients of the 2 outputs and writes 4 gradients: 10 tensors.

**Numerics.** Rows are read in their own dtype; the three row statistics, the gate and everything until the
store are float32. The new stream is rounded once and its statistic is of the rounded rows. The gradients of
`bias`, `gain` and `scale` are float32 sums over the rows in a fixed order: block by block, then over blocks.

**Saved for the backward pass.** The inputs. Statistics, gate and new stream are computed again on chip.

**Range.** As in `add_rms_norm`: rows of RMS beyond 1e18 overflow.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.checks import check_dtype, check_float, check_shapes, refuse_argument
from pallas_kernels.dispatch import Implementation, Op, run

OP = Op(
    package=__name__,
    inputs=(1, 1, 1, 1, None, None),
    outputs=(1, 1),
    keep_inputs=(0, 1, 2, 3, 4, 5),
    implementations=("xla", "mosaic_tpu", "pallas_triton", "triton"),
)


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
    implementation: Implementation = None,
) -> tuple[Float[Array, "*N D"], Float[Array, "*N D"]]:
    """`stream' = stream + r * update` and `normed = scale * gain * stream' / |stream'|`.

    `r = sigmoid(gate_state / |stream| + gate_update / |update| + bias)` with `|x| = sqrt(mean(x^2) +
    epsilon)` per row; `gate_state = stream @ W_h` and `gate_update = update @ W_u` make it the gate of Review
    Residuals.

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
      ValueError: a shape or dtype other than the above, or no implementation takes these arguments.
    """
    rows = {"stream": stream, "update": update, "gate_state": gate_state, "gate_update": gate_update}
    vectors = {"bias": bias, "gain": gain}
    scale = jnp.asarray(scale, gain.dtype if hasattr(gain, "dtype") else jnp.float32)
    shapes = {name: (x, ("...", "D")) for name, x in rows.items()}
    shapes |= {name: (x, ("D",)) for name, x in vectors.items()}
    check_shapes("review_update", shapes | {"scale": (scale, ())})
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        refuse_argument("review_update", "epsilon", epsilon, "a Python float between 0 and 1")
    check_float("review_update", stream=stream)
    check_dtype("review_update", stream.dtype, **rows)
    check_dtype("review_update", jnp.float32, **vectors)
    # One [D] product outside the kernels gives the gradients of both factors from the kernel's one.
    return run(OP, implementation, *rows.values(), bias, scale * gain, epsilon=epsilon)
