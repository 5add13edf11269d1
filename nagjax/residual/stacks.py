"""Helpers for branches that a module runs in a scan: tests for stacked branches, their state between calls, and the
error for anything else."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nagjax.errors import UserError


def refused(branches: Any, sublayers: int) -> UserError:
    """The error for branches that are neither a list of `sublayers` callables nor stacked modules for this many
    sublayers."""
    given = type(branches).__name__
    stacked = f"one stacked module with parameters [{sublayers}, ...], or k of [{sublayers} / k, ...]"
    if isinstance(branches, Sequence | nnx.List):
        return UserError("branches", f"{len(branches)} of them", f"give {sublayers} callables, {stacked}")
    if isinstance(branches, nnx.Sequential):
        return UserError("branches", given, "is one branch: give its layers, model.layers")
    if isinstance(branches, Iterable) and not isinstance(branches, nnx.Module):
        return UserError("branches", given, "is not a list: give list(branches)")
    fix = f"put it into a list of {sublayers}"
    if sublayers > 1:
        fix += f" callables, or give {stacked} (nnx.vmap)"
    return UserError("branches", given, f"is one branch that is not stacked: {fix}")


VECTORS = ("bias", "scale", "gain")  # names of parameters that are not matrices


def stacks_of_one(branches: Iterable[Any]) -> bool:
    """Whether all branches are modules stacked for a single sublayer, with parameters [1, ...]."""
    return all(isinstance(own, nnx.Module) and _stack_of_one(own) for own in branches)


def _stack_of_one(own: nnx.Module) -> bool:
    """Whether each leaf has a first axis of 1, and a vector or a linear map has one axis more than in a single module.
    The kernel of a convolution may have [1, ...] by itself."""
    if any(jnp.shape(leaf)[:1] != (1,) for leaf in jax.tree.leaves(nnx.state(own))):
        return False
    linear = [one.kernel for _, one in nnx.iter_modules(own) if isinstance(one, nnx.Linear)]
    vectors = [leaf for path, leaf in nnx.to_flat_state(nnx.state(own, nnx.Param)) if path[-1] in VECTORS]
    return any(kernel.ndim == 3 for kernel in linear) or any(leaf.ndim == 2 for leaf in vectors)


def values(state: nnx.State) -> dict[tuple, list[Array]]:
    return {path: jax.tree.leaves(own) for path, own in nnx.to_flat_state(state)}


def changed(old: dict[tuple, list[Array]], state: nnx.State) -> nnx.State:
    """The part of the branches' state that a call has changed. Writing back the rest, too, would fail where Flax allows
    no update: in a transformation that closes over a model in evaluation."""
    same = lambda path, own: path in old and all(map(operator.is_, old[path], jax.tree.leaves(own)))  # noqa: E731
    return nnx.from_flat_state([(path, own) for path, own in nnx.to_flat_state(state) if not same(path, own)])


def unstacked[T](tree: T) -> list[T]:
    """Splits a tree with leaves [S, ...] into S trees. Each leaf is split once, so that its gradient is a single
    concatenation."""
    parts = jax.tree.map(lambda x: [part[0] for part in jax.lax.split(x, (1,) * x.shape[0], axis=0)], tree)
    return jax.tree.transpose(jax.tree.structure(tree), None, parts)
