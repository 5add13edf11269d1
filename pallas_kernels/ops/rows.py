"""`take_rows` and `put_rows`: rows by index, for Mixture-of-Depths.

Implementations see groups of rows, `[G, N, D]` with `[G, k]` indices into each group, as one `[G N, D]` array. Indices
must be unique and in range. Therefore `put_rows` needs no addition and can write in place, in any order, and the
gradient of each op is the other one.
"""

from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import check_dtype, check_float, check_indices, check_shapes
from pallas_kernels.dispatch import Implementation, ImplementationName, Op, run
from pallas_kernels.launch import flat, flat_indices, gpu, mosaic_gpu, raw_triton, tpu_copy


def take_rows(
    x: Float[Array, "*G N D"],
    indices: Int[Array, "*G k"],
    *,
    implementation: ImplementationName = None,
) -> Float[Array, "*G k D"]:
    """The rows of `x` at `indices`, on which a Mixture-of-Depths sublayer runs.

    Why this exists: the gradient of a plain gather is a scatter that adds, row by row or with atomics; with unique
    indices it is a put. Reads and writes k rows. Numerics: exact. Saved for the backward pass: the indices.

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
    return run(TAKE, implementation, x, indices, rows=x.shape[-2])[0]


def put_rows(
    x: Float[Array, "*G N D"],
    rows: Float[Array, "*G k D"],
    indices: Int[Array, "*G k"],
    *,
    implementation: ImplementationName = None,
) -> Float[Array, "*G N D"]:
    """`x` with its rows at `indices` replaced; the other rows are not changed.

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
    shapes = {"x": (x, ("...", "N", "D")), "rows": (rows, ("...", "k", "D")), "indices": (indices, ("...", "k"))}
    check_shapes("put_rows", shapes)
    check_float("put_rows", x=x)
    check_dtype("put_rows", x.dtype, rows=rows)
    check_dtype("put_rows", "int32", indices=indices)
    check_indices("put_rows", indices, x.shape[-2])
    return run(PUT, implementation, x, rows, indices)[0]


_CONTRACT = dict(mode="promise_in_bounds", unique_indices=True)
# XLA's own gather and scatter, in place if the compiler may reuse `x`.
XLA = SimpleNamespace(
    take=lambda x, indices: x.at[indices].get(**_CONTRACT),
    put=lambda x, rows, indices: x.at[indices].set(rows, **_CONTRACT),
)


def _take(copies: ModuleType | SimpleNamespace) -> tuple:
    """`take_rows` with any module that can `take` and `put` flat rows."""

    def forward(x, indices, *, rows: int):
        taken = copies.take(flat(x), flat_indices(indices, rows))
        return (taken.reshape(*indices.shape, x.shape[-1]),), ()

    def backward(residuals, cotangents, *, rows: int):
        (indices,), (g,) = residuals, cotangents
        groups, width = indices.shape[0], g.shape[-1]
        into = jnp.zeros((groups * rows, width), g.dtype)
        return (copies.put(into, flat(g), flat_indices(indices, rows)).reshape(groups, rows, width),)

    return forward, backward


def _put(copies: ModuleType | SimpleNamespace) -> tuple:
    """`put_rows` with any module that can `take` and `put` flat rows."""

    def forward(x, rows, indices):
        where = flat_indices(indices, x.shape[1])
        return (copies.put(flat(x), flat(rows), where).reshape(x.shape),), ()

    def backward(residuals, cotangents):
        (indices,), (g,) = residuals, cotangents
        where = flat_indices(indices, g.shape[1])
        replaced = copies.take(flat(g), where)
        kept = copies.put(flat(g), jnp.zeros_like(replaced), where)
        return kept.reshape(g.shape), replaced.reshape(*indices.shape, g.shape[-1])

    return forward, backward


def _refused_by_gpu(x, *others, **constants) -> str | None:
    return gpu.refuse_rows(gpu.MAX_WIDTH, x)


def _implementations(of) -> dict[str, Implementation]:
    return {
        "mosaic_tpu": Implementation(*of(tpu_copy), tpu_copy.PLATFORMS, tpu_copy.refusal, reserve=tpu_copy.reserve),
        "pallas_triton": Implementation(*of(gpu), gpu.PLATFORMS, _refused_by_gpu, gpu.unavailable),
        "mosaic_gpu": Implementation(*of(XLA), mosaic_gpu.PLATFORMS, unavailable=mosaic_gpu.unavailable),
        "triton": Implementation(*of(raw_triton), raw_triton.PLATFORMS, _refused_by_gpu, raw_triton.unavailable),
        "xla": Implementation(*of(XLA)),
    }


TAKE = Op(
    "take_rows",
    inputs=(2, 1),
    outputs=(2,),
    keep_inputs=(1,),
    reference=lambda x, indices, rows: (jnp.take_along_axis(x, indices[..., None], axis=1),),
    implementations=_implementations(_take),
    integer_inputs=(1,),
)
PUT = Op(
    "put_rows",
    inputs=(2, 2, 1),
    outputs=(2,),
    keep_inputs=(2,),
    reference=lambda x, rows, indices: (jax.vmap(lambda a, b, i: a.at[i].set(b))(x, rows, indices),),
    implementations=_implementations(_put),
    integer_inputs=(2,),
)
