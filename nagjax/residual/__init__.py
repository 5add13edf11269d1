"""Residual schemes. One file per scheme: a new file in this folder is found by name, nothing else to edit."""

import difflib
import importlib
import pkgutil
from functools import cache

from nagjax.errors import UserError
from nagjax.residual.scheme import Boundary, Scheme, Stream

__all__ = ["Boundary", "Scheme", "Stream", "find_scheme", "register", "schemes"]

_registered: dict[str, type[Scheme]] = {}


@cache
def _discovered() -> dict[str, type[Scheme]]:
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Scheme) and value.name == module.name:
                found[value.name] = value
    return found


def schemes() -> dict[str, type[Scheme]]:
    """Every scheme by name: the classes whose `name` is the name of their file here, and the registered ones."""
    return dict(sorted((_discovered() | _registered).items()))


def register(scheme: type[Scheme]) -> type[Scheme]:
    """Class decorator: make a scheme that lives outside this package known by its `name`."""
    if not scheme.name:
        raise UserError("scheme.name", scheme.__name__, "set the class attribute `name`")
    _registered[scheme.name] = scheme
    return scheme


def find_scheme(name: str) -> type[Scheme]:
    """The scheme class of that name; UserError with the nearest names otherwise."""
    known = schemes()
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError("scheme", name, f"{hint}known schemes: {', '.join(known)}")
    return known[name]
