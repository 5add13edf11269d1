"""The NAG update of selected rows, written back in place."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.checks import check_dtype, check_float, check_shapes
from pallas_kernels.dispatch import Implementation, Op, run
from pallas_kernels.rows.check_indices import check_indices

OP = Op(
    package=__name__,
    inputs=(2, 1, 2, 1, 1),
    outputs=(2, 1),
    keep_inputs=(2, 3, 4),
    extra=(2,),
    implementations=("mosaic_tpu", "pallas_triton", "triton", "xla"),
    integer_inputs=(4,),
)


def nag_update_rows(
    direction: Float[Array, "*G N D"],
    log_norm: Float[Array, "*G N"],
    update: Float[Array, "*G k D"],
    turn: Float[Array, "*G k"],
    indices: Int[Array, "*G k"],
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*G N D"], Float[Array, "*G N"]]:
    """`nag_update` of the rows at `indices`; a token that is not selected keeps its row and its log-norm.

    Why this exists: take, update and put without a copy of the stream. Numerics: as `nag_update`.
    Saved for the backward pass: the old selected rows, update, turn and indices; never the whole direction.

    Args:
      direction, log_norm: as in `nag_update`; leading dimensions (a batch) are groups that indices are local
      to. update, turn: for the selected rows, in the order of `indices`.
      indices: int32, unique within a group and in [0, N); see `checking_indices`.
      implementation: None for the best on the platform, a name, or names to try in order.

    Raises:
      ValueError: shapes that do not match, a wrong dtype, or no implementation that accepts them.
    """
    check_shapes(
        "nag_update_rows",
        {
            "direction": (direction, ("...", "N", "D")),
            "log_norm": (log_norm, ("...", "N")),
            "update": (update, ("...", "k", "D")),
            "turn": (turn, ("...", "k")),
            "indices": (indices, ("...", "k")),
        },
    )
    check_float("nag_update_rows", direction=direction, update=update)
    check_dtype("nag_update_rows", "float32", log_norm=log_norm, turn=turn)
    check_dtype("nag_update_rows", "int32", indices=indices)
    check_indices("nag_update_rows", indices, direction.shape[-2])
    return run(OP, implementation, direction, log_norm, update, turn, indices)
