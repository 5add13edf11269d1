"""A computation that cannot be lowered: the error for a platform that no chosen implementation runs on.

The platform is known only when a program is lowered, long after `implementation=` was read. So a platform
without an implementation gets this primitive, which has the right output types and raises its message when
lowered.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

_refuse_p = Primitive("refuse_platform")
_refuse_p.multiple_results = True


def refuse(message: str, like: Callable, *args: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays typed as `like(*args)`; lowering the program that contains them raises ValueError(message)."""
    shapes = jax.eval_shape(like, *args)
    leaves, tree = jax.tree.flatten(shapes)
    outs = _refuse_p.bind(message=message, types=tuple((s.shape, s.dtype) for s in leaves))
    return jax.tree.unflatten(tree, outs)


def _raise(message: str):
    raise ValueError(message)


_refuse_p.def_abstract_eval(lambda *, message, types: [jax.core.ShapedArray(s, d) for s, d in types])
_refuse_p.def_impl(lambda *, message, types: _raise(message))
mlir.register_lowering(_refuse_p, lambda ctx, *, message, types: _raise(message))
