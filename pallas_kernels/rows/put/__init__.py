"""Replace rows by index."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.checks import check_dtype, check_float, check_shapes
from pallas_kernels.dispatch import Implementation, Op, run
from pallas_kernels.rows.check_indices import check_indices

OP = Op(
    package=__name__,
    inputs=(2, 2, 1),
    outputs=(2,),
    keep_inputs=(2,),
    implementations=("mosaic_tpu", "pallas_triton", "triton", "xla"),
    integer_inputs=(2,),
)


def put_rows(
    x: Float[Array, "*G N D"],
    rows: Float[Array, "*G k D"],
    indices: Int[Array, "*G k"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "*G N D"]:
    """`x` with its rows at `indices` replaced; the others are not touched.

    Why this exists: kernels write k rows into the memory of `x` (XLA copies `x` first if something else still
    reads it). Numerics: exact. Saved for the backward pass: the indices.

    Args:
      x: rows, any float dtype; leading dimensions (a batch) are groups that indices are local to.
      rows: the new rows, of the same dtype.
      indices: int32, unique within a group and in [0, N); see `checking_indices`.
      implementation: None for the best on the platform, a name, or names to try in order.

    Raises:
      ValueError: shapes that do not match, a wrong dtype, or no implementation that accepts them.
    """
    check_shapes(
        "put_rows",
        {
            "x": (x, ("...", "N", "D")),
            "rows": (rows, ("...", "k", "D")),
            "indices": (indices, ("...", "k")),
        },
    )
    check_float("put_rows", x=x)
    check_dtype("put_rows", x.dtype, rows=rows)
    check_dtype("put_rows", "int32", indices=indices)
    check_indices("put_rows", indices, x.shape[-2])
    return run(OP, implementation, x, rows, indices)[0]
