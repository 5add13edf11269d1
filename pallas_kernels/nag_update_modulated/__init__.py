"""The NAG update with the modulator that decides its turn, in the same pass."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.checks import check_dtype, check_float, check_shapes
from pallas_kernels.dispatch import Implementation, Op, run

OP = Op(
    package=__name__,
    inputs=(1, 0, 1, None, None, None, None, None),
    outputs=(1, 0, 0),
    keep_inputs=(0, 2, 3, 4, 5, 6, 7),
    implementations=("mosaic_tpu", "pallas_triton", "triton", "composed", "xla"),
    best_first=("mosaic_tpu", "pallas_triton", "composed", "xla"),
)


def nag_update_modulated(
    direction: Float[Array, "*N D"],
    log_norm: Float[Array, "*N"],
    update: Float[Array, "*N D"],
    weight: Float[Array, "D C"],
    bias: Float[Array, " C"],
    logits: Float[Array, " C"],
    beta: Float[Array, ""],
    alpha: Float[Array, ""],
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*N D"], Float[Array, "*N"], Float[Array, "*N"]]:
    """`nag_update` by the turn `t = alpha * max(x, 1e-6) ** beta`, `x = softmax(logits) . sigmoid(r weight +
    bias)`.

    NAG, arXiv:2606.16112, equation 13, followed by 10-17.

    Why this exists: the left operand of the gate's [N, D] x [D, C] product is the row that the update has on
    chip. Gate and update are one kernel, forward and backward: 2 tensors read and 1 written, 3 read and 2
    written. On TPU the weight gradient is in it too; on GPU that is XLA's product, which reads the direction
    once more (see `fused_gpu`). What the kernels refuse, and a CPU, does it in two steps (see `two_steps`).
    Numerics: projections, mixture, power and every gradient of a parameter in float32; the weight takes part
    in full float32 precision for float32 rows and to 16 bits for bfloat16 rows. The mixture is clamped at
    1e-6 before the power, below which its gradient is zero. Parameter gradients are sums in an order fixed by
    the shapes. Saved for the backward pass: the inputs, but not log_norm. Backend: see
    `pallas_kernels.dispatch`.

    Args:
      direction: rows of RMS 1, any float dtype.
      log_norm: natural logarithm of each row's norm over sqrt(D), float32.
      update: what the branch proposes, any float dtype.
      weight, bias, logits, beta, alpha: the modulator, float32; C of the order of 32.
      implementation: None for the best on the platform, a name, or names to try in order.

    Returns:
      New direction (dtype of `direction`), log-norm and turn (float32).

    Raises:
      ValueError: shapes that do not match, a wrong dtype, or no implementation that accepts them.
    """
    rows = dict(direction=direction, update=update)
    exact = dict(log_norm=log_norm, weight=weight, bias=bias, logits=logits, beta=beta, alpha=alpha)
    check_shapes(
        "nag_update_modulated",
        {
            "direction": (direction, ("...", "D")),
            "log_norm": (log_norm, ("...",)),
            "update": (update, ("...", "D")),
            "weight": (weight, ("D", "C")),
            "bias": (bias, ("C",)),
            "logits": (logits, ("C",)),
            "beta": (beta, ()),
            "alpha": (alpha, ()),
        },
    )
    check_float("nag_update_modulated", **rows)
    check_dtype("nag_update_modulated", "float32", **exact)
    return run(OP, implementation, direction, log_norm, update, weight, bias, logits, beta, alpha)
