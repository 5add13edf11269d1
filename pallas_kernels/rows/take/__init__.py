"""Select rows by index."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.checks import check_dtype, check_float, check_shapes
from pallas_kernels.dispatch import Implementation, Op, run
from pallas_kernels.rows.check_indices import check_indices

OP = Op(
    package=__name__,
    inputs=(2, 1),
    outputs=(2,),
    keep_inputs=(1,),
    implementations=("mosaic_tpu", "pallas_triton", "triton", "xla"),
    integer_inputs=(1,),
)


def take_rows(
    x: Float[Array, "*G N D"],
    indices: Int[Array, "*G k"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "*G k D"]:
    """The rows of `x` at `indices`: what a Mixture-of-Depths block runs on.

    Why this exists: the gradient of a plain gather is a scatter that adds, row by row or with atomics; unique
    indices make it a put. Reads and writes k rows. Numerics: exact. Saved for the backward pass: the indices.

    Args:
      x: rows, any float dtype; leading dimensions (a batch) are groups that indices are local to.
      indices: int32, unique within a group and in [0, N); see `checking_indices`.
      implementation: None for the best on the platform, a name, or names to try in order.

    Raises:
      ValueError: shapes that do not match, a wrong dtype, or no implementation that accepts them.
    """
    check_shapes("take_rows", {"x": (x, ("...", "N", "D")), "indices": (indices, ("...", "k"))})
    check_float("take_rows", x=x)
    check_dtype("take_rows", "int32", indices=indices)
    check_indices("take_rows", indices, x.shape[-2])
    return run(OP, implementation, x, indices, rows=x.shape[-2])[0]
