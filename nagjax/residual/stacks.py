"""Branches that a module runs in a scan: stacked ones, what they keep between calls, and what is no such branch."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nagjax.errors import UserError


def refused(branches: Any, sublayers: int) -> UserError:
    """The error for branches that are neither a list of callables nor stacked modules, for so many sublayers."""
    given = type(branches).__name__
    stacked = f"one stacked module with parameters [{sublayers}, ...], or k of [{sublayers} / k, ...]"
    if isinstance(branches, Sequence | nnx.List):
        return UserError("branches", f"{len(branches)} of them", f"give {sublayers} callables, {stacked}")
    if isinstance(branches, nnx.Sequential):
        return UserError("branches", given, "is one branch: give its layers, model.layers")
    if isinstance(branches, Iterable) and not isinstance(branches, nnx.Module):
        return UserError("branches", given, "is no list: give list(branches)")
    fix = f"put it into a list of {sublayers}"
    if sublayers > 1:
        fix += f" callables, or give {stacked} (nnx.vmap)"
    return UserError("branches", given, f"is one branch that is not stacked: {fix}")


VECTORS = ("bias", "scale", "gain")  # names of parameters that are not matrices


def stacks_of_one(branches: Iterable[Any]) -> bool:
    """Whether all are modules that stand for one sublayer each, with parameters [1, ...]."""
    return all(isinstance(own, nnx.Module) and _stack_of_one(own) for own in branches)


def _stack_of_one(own: nnx.Module) -> bool:
    """Whether each leaf has a first axis of 1, and one of them an axis more than it has in a single module: a vector or
    a linear map. The kernel of a convolution has [1, ...] by itself."""
    if any(jnp.shape(leaf)[:1] != (1,) for leaf in jax.tree.leaves(nnx.state(own))):
        return False
    linear = [one.kernel for _, one in nnx.iter_modules(own) if isinstance(one, nnx.Linear)]
    vectors = [leaf for path, leaf in nnx.to_flat_state(nnx.state(own, nnx.Param)) if path[-1] in VECTORS]
    return any(kernel.ndim == 3 for kernel in linear) or any(leaf.ndim == 2 for leaf in vectors)


def values(state: nnx.State) -> dict[tuple, list[Array]]:
    return {path: jax.tree.leaves(own) for path, own in nnx.to_flat_state(state)}


def changed(old: dict[tuple, list[Array]], state: nnx.State) -> nnx.State:
    """What branches have changed of their state. An update of the rest too would fail where Flax allows none: in a
    transformation that closes over a model in evaluation."""
    same = lambda path, own: path in old and all(map(operator.is_, old[path], jax.tree.leaves(own)))  # noqa: E731
    return nnx.from_flat_state([(path, own) for path, own in nnx.to_flat_state(state) if not same(path, own)])


def unstacked[T](tree: T) -> list[T]:
    """The S trees of one with leaves [S, ...], each leaf by a single split: its gradient is a single concatenation."""
    parts = jax.tree.map(lambda x: [part[0] for part in jax.lax.split(x, (1,) * x.shape[0], axis=0)], tree)
    return jax.tree.transpose(jax.tree.structure(tree), None, parts)
