"""Classes found by the name of their file or brought by other packages; and what is said to someone who named one that
is not there."""

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from nagjax.errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

SCHEME_GROUP = "nagjax.schemes"  # the group of entry points that are residual schemes


def classes_by_file[T](package: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """The subclasses of `base` in a package's modules whose `name` is that of their module, sorted by name."""
    found = {}
    for module in sorted(name for _, name, _ in pkgutil.iter_modules(package.__path__)):
        for value in vars(importlib.import_module(f"{package.__name__}.{module}")).values():
            if isinstance(value, type) and issubclass(value, base) and value.name == module:
                found[module] = value
    return found


def installed(group: str) -> "dict[str, EntryPoint]":
    """What installed packages bring, by name: their entry points in a group."""
    from importlib.metadata import entry_points  # a twentieth of a second, which few commands need

    return {point.name: point for point in entry_points(group=group)}


def pick[T](field: str, name: str, known: Mapping[str, T], plural: str) -> T:
    """`known[name]`. Raises UserError for `field` with the nearest name and all of them."""
    if name not in known:
        raise UserError(field, name, f"{nearest(name, known)}known {plural}: {', '.join(known)}")
    return known[name]


def nearest(name: str, known: Iterable[str]) -> str:
    """A question to the user that ends in a space, or nothing."""
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}? " if near else ""
