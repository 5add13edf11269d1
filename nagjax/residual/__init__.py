"""Residual schemes: the protocol, what schemes share, and the schemes themselves, one file each in `schemes/`."""

from functools import cache

from nagjax.discovery import classes_by_file, pick
from nagjax.errors import UserError
from nagjax.residual import schemes as _files
from nagjax.residual.protocol import Boundary, Scheme, Stream

__all__ = ["Boundary", "Scheme", "Stream", "find_scheme", "register", "schemes"]

_registered: dict[str, type[Scheme]] = {}


@cache
def _discovered() -> dict[str, type[Scheme]]:
    return classes_by_file(_files, Scheme)


def schemes() -> dict[str, type[Scheme]]:
    """Every scheme by name: the registered ones, and one for each file in `schemes/`, whose `name` is the file's."""
    return dict(sorted((_discovered() | _registered).items()))


def register(scheme: type[Scheme]) -> type[Scheme]:
    """Class decorator that makes a scheme from outside this package known by its `name`; again, in place of the one
    registered before. Its title is its name unless it has one. Raises UserError for a class without a name, and for a
    class or a name of a scheme in `schemes/`."""
    if not scheme.name:
        raise UserError("scheme.name", scheme.__name__, "set the class attribute `name`")
    for own in _discovered().values():
        if scheme is not own and scheme.name == own.name:
            fix = f"is nagjax's own {own.__name__}: give {scheme.__name__} another class attribute `name`"
            raise UserError("scheme.name", scheme.name, fix)
        if scheme is not own and scheme.__name__ == own.__name__:
            raise UserError("scheme", scheme.__name__, f"is the class of nagjax's own {own.name}: name yours otherwise")
    if "title" not in vars(scheme):
        scheme.title = scheme.name  # the title that it inherits is another scheme's
    _registered[scheme.name] = scheme
    return scheme


def find_scheme(name: str) -> type[Scheme]:
    """The scheme class of this name. Raises UserError with the nearest names if there is none."""
    return pick("scheme", name, schemes(), "schemes")
