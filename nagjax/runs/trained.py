"""Which parameters a run trains: all except those that `--freeze` names; with LoRA, only its adapters.

Parameters that are not trained have no gradient, no update and no optimizer state; they are in every checkpoint.
"""

import dataclasses
from fnmatch import fnmatchcase
from typing import Any

import jax

from nagjax.discovery import nearest
from nagjax.errors import UserError
from nagjax.parameters import ROLES

Tree = Any


def marked(parameters: Tree, freeze: tuple[str, ...], lora: bool) -> Tree:
    """The parameters (`nagjax.runs.blueprint.Parameter`) with `trained` set by these settings."""

    def one(path: tuple, parameter: Any) -> Any:
        return dataclasses.replace(parameter, trained=is_trained(dotted(path), parameter.role, freeze, lora))

    return jax.tree_util.tree_map_with_path(one, parameters)


def is_trained(name: str, role: str, freeze: tuple[str, ...], lora: bool) -> bool:
    """Whether a parameter of this name and role is trained; `lora` says whether its model has adapters."""
    return not any(_names(pattern, name, role) for pattern in freeze) and (not lora or role == "adapter")


def check_freeze(parameters: Tree, freeze: tuple[str, ...]) -> None:
    """Raises UserError for a pattern that names no parameter, and if no parameter is left to train."""
    known = [(dotted(path), p) for path, p in jax.tree_util.tree_leaves_with_path(parameters)]
    for pattern in freeze:
        if not any(_names(pattern, name, p.role) for name, p in known):
            if pattern in ROLES:
                there = ", ".join(sorted({p.role for _, p in known}))
                tied = "; a head tied to the embedding has no parameters of its own" if pattern == "head" else ""
                raise UserError("freeze", pattern, f"no parameter has this role: there are {there}{tied}")
            names = sorted({name for name, _ in known})
            fix = f"names no parameter: give a role ({', '.join(ROLES)}) or a pattern of names such as blocks.mlp.*"
            raise UserError("freeze", pattern, f"{nearest(pattern, names)}{fix}; there are {', '.join(names)}")
    if not any(p.trained for _, p in known):
        raise UserError("freeze", freeze, "leaves nothing to train: name fewer parameters")


def trained_part(tree: Tree, parameters: Tree) -> Tree:
    """The trained leaves of a nested dict shaped like the parameters, without branches that have none."""
    if all(p.trained for p in jax.tree.leaves(parameters)):
        return tree
    kept = {}
    for name, known in parameters.items():
        if isinstance(known, dict):
            if inner := trained_part(tree[name], known):
                kept[name] = inner
        elif known.trained:
            kept[name] = tree[name]
    return kept


def with_part(tree: Tree, part: Tree) -> Tree:
    """A nested dict in which the leaves of `part` replace its own."""
    inside = lambda name, own: with_part(own, part[name]) if isinstance(own, dict) else part[name]  # noqa: E731
    return {name: inside(name, own) if name in part else own for name, own in tree.items()}


def count_trained(parameters: Tree) -> int:
    """The number of trained scalars."""
    return sum(p.size for p in jax.tree.leaves(parameters) if p.trained)


def dotted(path: tuple) -> str:
    """A parameter's dotted name, such as blocks.attention.branch.query."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _names(pattern: str, name: str, role: str) -> bool:
    return pattern == role or fnmatchcase(name, pattern)
