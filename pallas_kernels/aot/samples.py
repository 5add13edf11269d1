"""Every op of the package with abstract arguments to compile it for."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import jax.numpy as jnp
from jax import ShapeDtypeStruct as Like

import pallas_kernels
from pallas_kernels.dispatch import Op

GATES = 32  # of a modulator
GROUPS, SHARE = 4, 4  # row ops: groups of rows, and one row in SHARE selected


@dataclasses.dataclass(frozen=True)
class Sample:
    """Abstract arguments of an op's implementations, [N, D] rows among them, and compile-time constants.

    `measured` ops visit each row once, so the bytes of a program say what they cost. An op that works on
    selected rows in place touches a part of its operands, which program text does not show.
    """

    args: tuple[Like, ...]
    constants: dict[str, float]
    measured: bool = True


def ops() -> dict[str, Op]:
    """Every op by the path of its folder, as in `rows.take`."""
    found = {}
    prefix = pallas_kernels.__name__ + "."
    for info in pkgutil.walk_packages(pallas_kernels.__path__, prefix):
        if info.ispkg and not info.name.startswith(prefix + "aot"):
            op = getattr(importlib.import_module(info.name), "OP", None)
            found |= {info.name.removeprefix(prefix): op} if op else {}
    return found


def sample(op: str, n: int, width: int, dtype: str) -> Sample:
    """Arguments of `n` rows of `width`."""
    row, scalar, vector = Like((n, width), dtype), Like((n,), jnp.float32), Like((width,), jnp.float32)
    gates, one = Like((GATES,), jnp.float32), Like((), jnp.float32)
    each = max(n // GROUPS, SHARE)
    x, part = Like((GROUPS, each, width), dtype), Like((GROUPS, each // SHARE, width), dtype)
    numbers, turns = Like(part.shape[:2], jnp.int32), Like(part.shape[:2], jnp.float32)
    known = {
        "nag_update": Sample((row, scalar, row, scalar), {}),
        "nag_update_modulated": Sample(
            (row, scalar, row, Like((width, GATES), jnp.float32), gates, gates, one, one), {}
        ),
        "add_rms_norm": Sample((row, row, vector), {"epsilon": 1e-6}),
        "review_update": Sample((row, row, row, row, vector, vector), {"epsilon": 1e-5}),
        "rows.take": Sample((x, numbers), {"rows": each}, measured=False),
        "rows.put": Sample((x, part, numbers), {}, measured=False),
        "rows.nag_update": Sample((x, Like(x.shape[:2], jnp.float32), part, turns, numbers), {}, measured=False),
    }
    if op not in known:
        raise ValueError(f"no arguments known for the op {op!r}: add them to {__name__}.sample")
    return known[op]
