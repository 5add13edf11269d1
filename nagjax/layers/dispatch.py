"""Moves tokens to their experts and back: dropless by ragged matmuls, or by capacity.

Dropless: all (token, choice) pairs are sorted by expert, and one ragged matmul multiplies each expert's rows with its
matrix; nothing is dropped or padded. Capacity: each expert has room for `ceil(capacity * A T / n)` tokens of every
sequence, so that its matmuls are ordinary batched ones; a choice that finds no room adds nothing to the update. Room
goes to the earlier tokens of the sequence, so that a token's update depends on no later token.

On a mesh each device dispatches its own tokens, under `shard_map`. The `expert` axis splits both the batch and the
experts, so devices along it exchange rows: by capacity in two all-to-alls. Dropless, a device cannot know how many rows
it will receive; so all rows are gathered, each device runs its own experts on them, and the sums are scattered back.

Numerics: matmuls in x's dtype; the weighted sum over the choices in float32.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from nagjax.errors import UserError
from nagjax.layers.int8 import Quantized
from nagjax.layers.ragged import ragged_matmul
from pallas_kernels.placement import current_placement

EXPERT, TENSOR = "expert", "tensor"  # mesh axes over which experts and their hidden features are split

Activation = Callable[..., Array]  # of the products with gate, if there is one, and up


class Matrices(NamedTuple):
    """The experts' matrices, in the dtype of the computation; on a device of a mesh, its part of them."""

    gate: Float[Array, "E D F"] | Quantized | None
    up: Float[Array, "E D F"] | Quantized
    down: Float[Array, "E F D"] | Quantized


class Dispatch(NamedTuple):
    """What is known before tracing: the room per sequence and expert in tokens (None: dropless), the number of experts,
    and the mesh axes that split experts and hidden features (None: not split)."""

    room: int | None
    experts: int
    by_expert: str | None = None
    by_feature: str | None = None


def run_experts(
    x: Float[Array, "B T D"],
    ids: Int[Array, "B T A"],
    weights: Float[Array, "B T A"],
    matrices: Matrices,
    activation: Activation,
    capacity: float | None,
    choices: int,
) -> tuple[Float[Array, "B T D"], Float[Array, " B"]]:
    """The weighted sum of the outputs of each token's experts, in x's dtype, and the number of dropped choices of each
    sequence, float32.

    ids: the chosen experts; an id of E or more runs nothing. choices: n, the number of options of a token, which sets
    the capacity. capacity: room relative to an equal share; None: dropless. Raises UserError for a capacity on a mesh
    that splits the tokens of a sequence.
    """
    experts, tokens = matrices.up.shape[0], x.shape[1]
    room = None if capacity is None else min(math.ceil(capacity * ids.shape[-1] * tokens / choices), tokens)
    placement, given = current_placement(), (x, ids, weights, matrices)
    if placement is None:
        return _on_device(*given, activation=activation, how=Dispatch(room, experts))
    if room is not None and placement.parts(1) > 1:
        fix = "the tokens of a sequence are split over devices, and room is for whole ones: use dropless"
        raise UserError("moe.dispatch", "capacity", fix)
    mesh: Any = placement.mesh
    splits = lambda axis, size: axis if mesh.shape.get(axis, 1) > 1 and size % mesh.shape[axis] == 0 else None  # noqa: E731
    how = Dispatch(room, experts, splits(EXPERT, experts), splits(TENSOR, matrices.up.shape[-1]))
    inward: Any = P(how.by_expert, None, how.by_feature)
    outward: Any = P(how.by_expert, how.by_feature, None)
    rows: Any = placement.rows
    body = functools.partial(_on_device, activation=activation, how=how)
    specs = Matrices(None if matrices.gate is None else inward, inward, outward)
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(rows, rows, rows, specs), out_specs=(rows, P(rows[0])), check_vma=False
    )
    return run(*given)


def _on_device(x, ids, weights, matrices: Matrices, *, activation: Activation, how: Dispatch):
    """Runs the tokens of one device; with `by_expert`, `matrices` holds only the device's own experts."""
    if how.room is not None:
        return _by_capacity(x, ids, weights, matrices, activation, how)
    if how.by_expert:
        x, ids, weights = (jax.lax.all_gather(part, how.by_expert, axis=0, tiled=True) for part in (x, ids, weights))
    own = matrices.up.shape[0]
    first = jax.lax.axis_index(how.by_expert) * own if how.by_expert else 0
    mine = (ids >= first) & (ids < first + own)
    done = _dropless(x, jnp.where(mine, ids - first, own), weights, matrices, activation)
    if how.by_feature:
        done = jax.lax.psum(done, how.by_feature)
    if how.by_expert:
        done = jax.lax.psum_scatter(done, how.by_expert, scatter_dimension=0, tiled=True)
    return done.astype(x.dtype), jnp.zeros(done.shape[:1], jnp.float32)


def _dropless(x, ids, weights, matrices: Matrices, activation: Activation) -> Float[Array, "B T D"]:
    """Sorts the pairs by expert, with those of no expert last, and runs them. Float32."""
    experts, choices = matrices.up.shape[0], ids.shape[-1]
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=experts + 1)[:experts].astype(jnp.int32)
    rows = x.reshape(-1, x.shape[-1])[order // choices]
    matmul = lambda rows, weight: ragged_matmul(rows, weight, sizes)  # noqa: E731
    inner = activation(*(matmul(rows, own) for own in (matrices.gate, matrices.up) if own is not None))
    done = matmul(inner, matrices.down)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    pairs = done[back].reshape(*ids.shape, x.shape[-1])
    weights = jnp.where(ids < experts, weights, 0.0)
    return jnp.einsum("btad,bta->btd", pairs.astype(jnp.float32), weights)


def _by_capacity(x, ids, weights, matrices: Matrices, activation: Activation, how: Dispatch):
    batch, tokens, choices = ids.shape
    room = how.room or 0
    chosen = jax.nn.one_hot(ids.reshape(batch, -1), how.experts, dtype=jnp.int32)
    rank = jnp.sum((jnp.cumsum(chosen, axis=1) - 1) * chosen, axis=-1).reshape(ids.shape)
    some = ids < how.experts
    fits = some & (rank < room)
    slots = jnp.where(fits, ids * room + rank, how.experts * room)  # the last slot belongs to no expert
    at = jnp.arange(batch)[:, None]
    token = jnp.broadcast_to(jnp.arange(tokens)[:, None], (tokens, choices)).reshape(-1)
    source = jnp.full((batch, how.experts * room + 1), tokens).at[at, slots.reshape(batch, -1)].set(token)[:, :-1]
    rows = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))[at, source].reshape(batch, how.experts, room, x.shape[-1])
    if how.by_expert:
        rows = jax.lax.all_to_all(rows, how.by_expert, split_axis=1, concat_axis=0, tiled=True)

    def matmul(rows, weight):
        if isinstance(weight, Quantized):  # an evaluation with 8-bit weights
            return jax.vmap(operator.matmul, (1, 0), 1)(rows, weight)
        return jnp.einsum("becm,emn->becn", rows, weight)

    inner = activation(*(matmul(rows, own) for own in (matrices.gate, matrices.up) if own is not None))
    done = matmul(inner, matrices.down)
    if how.by_feature:
        done = jax.lax.psum(done, how.by_feature)
    if how.by_expert:
        done = jax.lax.all_to_all(done, how.by_expert, split_axis=0, concat_axis=1, tiled=True)
    done = jnp.pad(done.reshape(batch, how.experts * room, -1), ((0, 0), (0, 1), (0, 0)))
    pairs = done[at, slots.reshape(batch, -1)].reshape(*ids.shape, -1)
    update = jnp.einsum("btad,bta->btd", pairs.astype(jnp.float32), jnp.where(fits, weights, 0.0))
    return update.astype(x.dtype), jnp.sum(some & ~fits, axis=(1, 2)).astype(jnp.float32)
