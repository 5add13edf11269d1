"""The NAG update of selected rows, written back in place: `nag_update_rows`.

With Pallas-Triton one kernel takes the rows, updates them and puts them back, forward and backward: a selected row is
read once and written once, into the memory of the stream, without intermediate arrays. The old rows are saved for the
backward pass, which replaces the incoming gradient of the selected rows by that of the old rows, also in place. All
other implementations do this in three steps, with an implementation of `nag_update`; XLA then updates the log-norms.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.checks import check_dtype, check_float, check_indices, check_shapes
from pallas_kernels.dispatch import Implementation, ImplementationName, Op, run
from pallas_kernels.launch import flat, flat_indices, gpu, tpu_copy
from pallas_kernels.ops import nag_update as plain
from pallas_kernels.ops.rows import XLA


def nag_update_rows(
    direction: Float[Array, "*G N D"],
    log_norm: Float[Array, "*G N"],
    update: Float[Array, "*G k D"],
    turn: Float[Array, "*G k"],
    indices: Int[Array, "*G k"],
    *,
    implementation: ImplementationName = None,
) -> tuple[Float[Array, "*G N D"], Float[Array, "*G N"]]:
    """`nag_update` of the rows at `indices`; all other rows keep their direction and log-norm.

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
    check_dtype("nag_update_rows", "float32", direction, update, log_norm=log_norm, turn=turn)
    check_dtype("nag_update_rows", "int32", indices=indices)
    check_indices("nag_update_rows", indices, direction.shape[-2])
    return run(OP, implementation, direction, log_norm, update, turn, indices)


def reference(direction, log_norm, update, turn, indices):
    """Takes, updates and puts the rows, by the references of the three ops."""

    def group(r, s, u, t, i):
        r_new, s_new = plain.reference(jnp.take(r, i, axis=0), s[i], u, t)
        return r.at[i].set(r_new), s.at[i].set(s_new)

    return jax.vmap(group)(direction, log_norm, update, turn, indices)


def _in_steps(step: str, copies_for=lambda x: XLA) -> Implementation:
    """An implementation in three steps, with an implementation of `nag_update` and a module that can `take` and `put`
    such rows. Only the selected rows of the old direction are saved, so that the stream itself can be overwritten."""
    inner = plain.OP.implementations[step]

    def forward(direction, log_norm, update, turn, indices):
        copies, where = copies_for(direction), flat_indices(indices, direction.shape[1])
        selected, s = copies.take(flat(direction), where), log_norm.reshape(-1)
        (new, new_s), _ = inner.forward(selected, XLA.take(s, where), flat(update), turn.reshape(-1))
        outputs = (
            copies.put(flat(direction), new, where).reshape(direction.shape),
            XLA.put(s, new_s, where).reshape(log_norm.shape),
        )
        return outputs, (selected.reshape(*indices.shape, direction.shape[-1]),)

    def backward(residuals, cotangents):
        (update, turn, indices, selected), (g, ds) = residuals, cotangents
        copies, where = copies_for(g), flat_indices(indices, g.shape[1])
        taken = copies.take(flat(g), where), XLA.take(ds.reshape(-1), where)
        dr, _, du, dt = inner.backward((flat(selected), flat(update), turn.reshape(-1)), taken)
        d_direction = copies.put(flat(g), dr.astype(g.dtype), where).reshape(g.shape)
        return d_direction, ds, du.reshape(update.shape), dt.reshape(turn.shape)

    def refusal(direction, log_norm, update, turn, indices) -> str | None:
        rows = [jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype) for x in (direction, update)]
        return inner.refusal(*rows) if inner.platforms else None

    return Implementation(forward, backward, inner.platforms, refusal, inner.unavailable)


def _forward_body(block, rows, scalars, vectors):
    return (plain.block_forward(block, *rows, *scalars), rows[0]), (), ()


FORWARD = dataclasses.replace(plain.FORWARD, op="nag_update_rows", body=_forward_body, outputs=2)
BACKWARD = dataclasses.replace(plain.BACKWARD, op="nag_update_rows")


def _gpu_forward(direction, log_norm, update, turn, indices):
    r, u, where = flat(direction), flat(update), flat_indices(indices, direction.shape[1])
    outputs, (s,), _ = gpu.rows_call(
        FORWARD,
        (r, u),
        (log_norm.reshape(-1), turn.reshape(-1)),
        indices=where,
        indirect=(0, 2),
        aliases={0: 0, 2: 2},
    )
    new, saved = outputs
    return (new.reshape(direction.shape), s.reshape(log_norm.shape)), (saved.reshape(update.shape),)


def _gpu_backward(residuals, cotangents):
    (update, turn, indices, selected), (g, ds) = residuals, cotangents
    rows = flat(selected), flat(update), flat(g)
    (dr, du), (dt,), _ = gpu.rows_call(
        BACKWARD,
        rows,
        (turn.reshape(-1), ds.reshape(-1)),
        like=(rows[2], rows[1]),
        indices=flat_indices(indices, g.shape[1]),
        indirect=(2, 4),
        aliases={2: 0},
    )
    return dr.reshape(g.shape), ds, du.reshape(update.shape), dt.reshape(turn.shape)


def _gpu_refusal(direction, log_norm, update, turn, indices) -> str | None:
    return gpu.refusal(BACKWARD, direction, update)


OP = Op(
    "nag_update_rows",
    inputs=(2, 1, 2, 1, 1),
    outputs=(2, 1),
    keep_inputs=(2, 3, 4),
    extra=(2,),
    reference=reference,
    implementations={
        "mosaic_tpu": _in_steps("mosaic_tpu", lambda x: tpu_copy if tpu_copy.one_by_one(x) else XLA),
        "pallas_triton": Implementation(_gpu_forward, _gpu_backward, gpu.PLATFORMS, _gpu_refusal, gpu.unavailable),
        "mosaic_gpu": _in_steps("mosaic_gpu"),
        "triton": _in_steps("triton"),
        "xla": _in_steps("xla"),
    },
    integer_inputs=(4,),
)
