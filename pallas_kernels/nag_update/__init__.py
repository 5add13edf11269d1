"""The NAG residual update: normalise, turn and rescale a row in one pass over memory."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.checks import check_dtype, check_float, check_shapes
from pallas_kernels.dispatch import Implementation, Op, run

OP = Op(
    package=__name__,
    inputs=(1, 0, 1, 0),
    outputs=(1, 0),
    keep_inputs=(0, 2, 3),
    implementations=("mosaic_tpu", "pallas_triton", "triton", "xla"),
)


def nag_update(
    direction: Float[Array, "*N D"],
    log_norm: Float[Array, "*N"],
    update: Float[Array, "*N D"],
    turn: Float[Array, "*N"],
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*N D"], Float[Array, "*N"]]:
    """Turn every row's direction towards its update by the angle arctan(turn), and grow its log-norm.

        c  = update - mean(update)              s' = s + log(1 + t^2) / 2
        w  = c - mean(c r) r
        n  = w / sqrt(mean(w^2) + 1e-12)
        y  = r + t n
        r' = y / sqrt(mean(y^2) + 1e-12)

    NAG, arXiv:2606.16112, equations 10-17, except that r' is divided by the measured RMS of y and not by the
    predicted sqrt(1 + t^2), which lets the norm drift in bfloat16; the log lane takes the predicted growth.

    Why this exists: the stream is the next branch's normalised input, so a sublayer boundary is this one
    pass: forward reads 2 and writes 1 tensor of [N, D]; backward reads 3 (the inputs; nothing else is saved)
    and writes 2.
    Numerics: statistics and arithmetic in float32, each output rounded once. An update with no part
    orthogonal to the direction (zero, constant over features, or parallel) leaves the direction as it is, and
    the log-norm still grows by its predicted log(1 + t^2) / 2; its gradients are finite. The mean's
    rounding errors count as such a part where they are not small beside the formula's 1e-6. Updates are exact
    up to an RMS of 1e17. A row of zeros stays zero.
    Backend: see `pallas_kernels.dispatch`; XLA on CPU.

    Args:
      direction: rows of RMS 1, any float dtype.
      log_norm: natural logarithm of each row's norm over sqrt(D), float32.
      update: what the branch proposes, any float dtype; its feature mean is removed here.
      turn: tangent of each row's rotation angle, float32.
      implementation: None for the best on the platform, a name, or names to try in order.

    Returns:
      New direction (dtype of `direction`) and log-norm (float32).

    Raises:
      ValueError: shapes that do not match, a wrong dtype, or no implementation that accepts them.
    """
    check_shapes(
        "nag_update",
        {
            "direction": (direction, ("...", "D")),
            "log_norm": (log_norm, ("...",)),
            "update": (update, ("...", "D")),
            "turn": (turn, ("...",)),
        },
    )
    check_float("nag_update", direction=direction, update=update)
    check_dtype("nag_update", "float32", log_norm=log_norm, turn=turn)
    return run(OP, implementation, direction, log_norm, update, turn)
