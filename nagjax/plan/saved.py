"""The memory that the layer scan keeps for the backward pass, found by tracing without compiling."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from nagjax.train.distributed.mesh import BATCH


def saved_bytes(jaxpr: Any, rows: int, shards: dict[str, int], space=jax.memory.Space.Device) -> int:
    """Bytes per device that forward scans save for their backward scans.

    `rows` is the batch of one scan, `shards` the number of devices along each axis of the mesh. A saved array with the
    shape of a block's parameters is a copy of them in another dtype, because the parameters themselves are inputs of
    the program. It counts as split over the axes that split parameters; every other array counts as split over the axes
    that split batch and tokens. `space` is the memory to count: what a rematerialisation policy keeps on the host is
    not in the device's memory.
    """
    stacks = {v.aval.shape[1:] for v in jaxpr.invars if v.aval.ndim > 1}
    batch = math.prod(shards.get(axis, 1) for axis in (*BATCH, "sequence"))
    parameters = shards.get("fsdp", 1) * shards.get("tensor", 1)
    total = 0
    for scan in _scans(jaxpr):
        inner = scan.params["jaxpr"]
        inner = getattr(inner, "jaxpr", inner)
        for outer, one in zip(scan.outvars, inner.outvars, strict=True):
            shape = outer.aval.shape
            stacked = shape != one.aval.shape and type(outer).__name__ != "DropVar"
            if stacked and not scan.params["reverse"] and outer.aval.memory_space == space:
                inside = one.aval.shape
                several = len(inside) > 2 and inside[1:] in stacks  # parameters of alternating blocks
                cast = inside[:1] != (rows,) and (inside in stacks or several)
                share = parameters if cast else batch
                total += int(np.prod(shape)) * np.dtype(outer.aval.dtype).itemsize // share
    return total


def _scans(jaxpr: Any) -> Iterator[Any]:
    """All scans except the head's: what its chunks stack up are already gradients (`nagjax.train.head_loss`)."""
    for equation in jaxpr.eqns:
        if "head" in str(equation.source_info.name_stack):
            continue
        if equation.primitive.name == "scan":
            yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _scans(inner)
