"""How the rows of an op are split over devices: one context that puts every row op under `shard_map`.

Why this exists: a Pallas kernel cannot be partitioned by the compiler, and a row op needs no communication. Model code
calls ops on global arrays and knows no mesh; the code that makes the mesh wraps the step once:

    step = shard_rows(step, mesh, P(("data", "fsdp")))

Every row op traced inside runs per shard, forward and backward. Gradients of replicated operands (gains, gate weights)
are summed over the row axes; nothing else is communicated. Axes that the spec does not name (such as a tensor-parallel
one) hold copies of the rows and need no collective either.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


class Placement(NamedTuple):
    """A mesh, and `rows`: `rows[i]` names the mesh axes that split leading dimension `i` of every row operand."""

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    rows: P

    def axes(self, dimension: int | None = None) -> tuple[str, ...]:
        """The mesh axes that split this leading dimension, or all of them, in order."""
        return _axes(self.rows if dimension is None else P(*tuple(self.rows)[dimension : dimension + 1]))

    def parts(self, dimension: int) -> int:
        """The number of parts into which this leading dimension is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(dimension))


_current: ContextVar[Placement | None] = ContextVar("row_placement", default=None)


def shard_rows(fn: Callable, mesh: jax.sharding.Mesh | None, rows: P | str) -> Callable:
    """`fn` with every row op inside it under `shard_map` on `mesh`.

    Args:
      fn: any function that calls row ops, for example a whole training step. Apply outside or inside
        `jax.jit`, but before `fn` has been traced: a traced function keeps its placement.
      mesh: Auto or Explicit axes. `None` gives `fn` back unchanged.
      rows: partition of the *leading* dimensions of row operands: `P("data")` splits the first one
        (batch, or the rows of an `[N, D]` array), `P("data", "seq")` the first two. Feature dimensions are
        never split, and an operand with fewer leading dimensions uses the beginning of the spec.

    Raises:
      ValueError: rows that are neither a name nor a PartitionSpec, or name an axis that the mesh has not.
    """
    if mesh is None:
        return fn
    spec = _checked(mesh, rows)

    @functools.wraps(fn)
    def placed(*args, **kwargs):
        with row_placement(mesh, spec):
            return fn(*args, **kwargs)

    return placed


@contextlib.contextmanager
def row_placement(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None, rows: P | str) -> Iterator[None]:
    """`shard_rows` for the row ops traced inside a `with` block. Raises ValueError as `shard_rows` does."""
    token = _current.set(None if mesh is None else Placement(mesh, _checked(mesh, rows)))
    try:
        yield
    finally:
        _current.reset(token)


def _checked(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, rows: P | str) -> P:
    if not isinstance(rows, P | str):
        raise ValueError(f"rows = {rows!r}: give the name of a mesh axis or a PartitionSpec of the leading dimensions")
    spec = P(rows) if isinstance(rows, str) else rows
    if unknown := [a for a in _axes(spec) if a not in mesh.axis_names]:
        raise ValueError(f"rows = {spec}: no axis {unknown} in the mesh, whose axes are {mesh.axis_names}")
    return spec


def current_placement() -> Placement | None:
    """The current placement; None outside of the context and inside a `shard_map` (whose axes are Manual)."""
    placement = _current.get()
    if placement is None:
        return None
    inside = jax.sharding.get_abstract_mesh()
    return None if AxisType.Manual in inside.axis_types else placement


def placement_of(args: Sequence[jax.Array], lead: Sequence[int | None]) -> Placement | None:
    """The current placement. If there is none and the mesh in use has Explicit axes, the placement of those rows that
    are split over the most of them; None if nothing is split, as `vmap` over a split axis leaves it."""
    placement, mesh = current_placement(), jax.sharding.get_abstract_mesh()
    if placement is not None or AxisType.Explicit not in mesh.axis_types or AxisType.Manual in mesh.axis_types:
        return placement
    specs = [tuple(jax.typeof(x).sharding.spec) for x in args]
    rows = max((P(*s[:n]) for s, n in zip(specs, lead, strict=True) if n is not None), key=lambda s: len(_axes(s)))
    return Placement(mesh, rows) if any(_axes(P(*spec)) for spec in specs) else None


def on_shards(
    fn: Callable,
    placement: Placement | None,
    lead: tuple[int | None, ...],
    out_lead: tuple[int | None, ...],
) -> Callable:
    """`fn(*arrays) -> tuple of arrays`, run once per shard of the rows.

    Args:
      lead: number of leading (row) dimensions of each argument; None marks a replicated one.
      out_lead: the same for each output; a None output is one partial sum per shard, and is summed.
    """
    if placement is None:
        return fn
    mesh, rows = placement
    in_specs, out_specs = (tuple(_spec(rows, n) for n in side) for side in (lead, out_lead))
    used = tuple(dict.fromkeys(a for s in in_specs for a in _axes(s)))

    def per_shard(*args):
        outs = fn(*args)
        return tuple(jax.lax.psum(o, used) if n is None and used else o for o, n in zip(outs, out_lead, strict=True))

    # No replicated argument of this shard_map is differentiated (an op's forward and backward each have their own), so
    # replication types are of no use here, and Pallas interpreters do not support them.
    return jax.shard_map(per_shard, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def check_divides(op: str, lead: Sequence[int], placement: Placement | None) -> None:
    """Raises ValueError if the mesh does not divide these leading dimensions of an op's rows."""
    if placement is None:
        return
    for dimension, size in enumerate(lead):
        if size % placement.parts(dimension):
            split = " x ".join(f"{axis}={placement.mesh.shape[axis]}" for axis in placement.axes(dimension))
            raise ValueError(f"{op}: {size} rows do not divide over {split}; pad them, or change rows= of shard_rows")


def alike(args: Sequence[jax.Array], like: Sequence[jax.Array] = ()) -> tuple[jax.Array, ...]:
    """`args`, all varying over the mesh axes over which any of them, or of `like`, varies. This is for a user's
    `shard_map`, which then sums the gradients of arguments that do not vary, such as a gain, over its axes."""
    axes = frozenset().union(*map(_varying, (*args, *like)))
    missing = [tuple(sorted(axes - _varying(x))) for x in args]
    return tuple(jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(args, missing, strict=True))


def varying(x: jax.Array) -> tuple[str, ...]:
    """The axes of a user's `shard_map` over which x varies, in the mesh's order; none where types are not checked."""
    found = _varying(x)
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in found)


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def place(args: tuple, placement: Placement | None, lead: tuple[int | None, ...]) -> tuple:
    """`args`, with their Explicit shardings (if the mesh has any) changed to those that `on_shards` expects."""
    if placement is None or AxisType.Explicit not in placement.mesh.axis_types:
        return args
    mesh, rows = placement
    explicit = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit}
    told = P(*(tuple(axis for axis in _axes(P(part)) if axis in explicit) or None for part in rows))
    return tuple(jax.sharding.reshard(a, NamedSharding(mesh, _spec(told, n))) for a, n in zip(args, lead, strict=True))


def _spec(rows: P, lead: int | None) -> P:
    return P() if lead is None else P(*tuple(rows)[:lead])


def _axes(spec: P) -> tuple[str, ...]:
    return tuple(a for part in spec if part for a in ((part,) if isinstance(part, str) else part))
