"""Branches that a module runs in a scan: stacked ones, what they keep between calls, and what is no such branch."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
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


def stacks_of_one(branches: Iterable[Any]) -> bool:
    """Whether all are modules that stand for one sublayer each, with parameters [1, ...]."""
    leaves = [jax.tree.leaves(nnx.state(own)) if isinstance(own, nnx.Module) else [] for own in branches]
    return all(own and all(leaf.shape[:1] == (1,) for leaf in own) for own in leaves)


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
