"""The registry of residual schemes: one for each file in `schemes/`, those that installed packages declare as entry
points of the group `nagjax.schemes`, and those that users register."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from nagjax.discovery import SCHEME_GROUP, classes_by_file, installed, pick
from nagjax.errors import UserError
from nagjax.residual import schemes as _files
from nagjax.residual.protocol import Scheme

_registered: dict[str, type[Scheme]] = {}
_asked: set[str] = set()  # groups of entry points that are already loaded: each once in a process


@cache
def own_schemes() -> dict[str, type[Scheme]]:
    """nagjax's own schemes by name: one for each file in `schemes/`, whose `name` is the name of its file."""
    return classes_by_file(_files, Scheme)


def schemes() -> dict[str, type[Scheme]]:
    """Every scheme by name: `own_schemes`, those of installed packages, and the registered ones. Warns once of each
    installed scheme that cannot be loaded."""
    if SCHEME_GROUP not in _asked:
        _asked.add(SCHEME_GROUP)  # before loading: a package may ask for the schemes while it is imported
        for name, point in installed(SCHEME_GROUP).items():
            _bring(name, point.load)
    return dict(sorted((own_schemes() | _registered).items()))


def _bring(name: str, load: Callable[[], Any]) -> None:
    """Registers the scheme that an entry point names. If this fails, it warns instead of raising, so that the other
    schemes stay available."""
    try:
        scheme = _whole(load())
        if scheme.name != name:
            raise UserError("scheme.name", scheme.name, f"name the entry point so, too; it is {name!r}")
        if name not in _registered:  # the user's own, or by the package itself
            register(scheme)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"the scheme {name!r}, an entry point of {SCHEME_GROUP}, cannot be loaded ({why})", stacklevel=3)


def register(scheme: type[Scheme]) -> type[Scheme]:
    """Class decorator that makes a scheme from outside this package known by its `name`. A class that is registered
    again replaces the earlier one; if its `name` has changed, the old name is removed, with a warning. A class that
    defines no title of its own gets its name as title.

    Raises UserError for a class that is not a scheme, has no name, lacks a method, or has options and is not a
    dataclass; for a name or class name that a scheme in `schemes/` has; and for the class name of another registered
    scheme, since modules are known by it.
    """
    if not _whole(scheme).name:
        raise UserError("scheme", scheme.__name__, "set the class attribute `name`")
    for own in own_schemes().values():
        if scheme is not own and scheme.name == own.name:
            fix = f"is nagjax's own {own.__name__}: give {scheme.__name__} another class attribute `name`"
            raise UserError("scheme.name", scheme.name, fix)
        if scheme is not own and scheme.__name__ == own.__name__:
            raise UserError("scheme", scheme.__name__, f"is the class of nagjax's own {own.name}: rename yours")
    for other in [own for own in _registered.values() if own.name != scheme.name]:
        if other.__name__ == scheme.__name__:
            _renamed(other, scheme)
            del _registered[other.name]
    if "title" not in vars(scheme):
        scheme.title = scheme.name  # an inherited title is another scheme's
    _registered[scheme.name] = scheme
    return scheme


def _whole(scheme: Any) -> type[Scheme]:
    """Returns the class if it is a complete scheme. Raises UserError otherwise."""
    if not (isinstance(scheme, type) and issubclass(scheme, Scheme)):
        named = getattr(scheme, "__name__", type(scheme).__name__)
        raise UserError("scheme", named, "give a subclass of nagjax.residual.Scheme")
    if missing := sorted(scheme.__abstractmethods__):
        raise UserError("scheme", scheme.__name__, f"has to define {', '.join(missing)}")
    hints = inspect.get_annotations(scheme)
    options = {name for name, hint in hints.items() if "ClassVar" not in str(hint)}
    if options - {field.name for field in dataclasses.fields(scheme)}:
        fix = f"has options ({', '.join(sorted(options))}): decorate it with @dataclasses.dataclass(frozen=True)"
        raise UserError("scheme", scheme.__name__, fix)
    return scheme


def _renamed(old: type[Scheme], new: type[Scheme]) -> None:
    """Warns that a class was defined again under another `name`, as happens in a notebook's cell. Raises UserError if
    `old` and `new` are two different classes, which classes defined inside a function always count as."""
    same = (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)
    if not same or "<locals>" in new.__qualname__:
        fix = f"is the class of the registered scheme {old.name!r}, too: rename one of the two"
        raise UserError("scheme", new.__name__, fix)
    warnings.warn(f"the scheme {old.name!r} is now {new.name!r}: {new.__name__} was defined again", stacklevel=3)


def find_scheme(name: str) -> type[Scheme]:
    """The scheme class of this name. Raises UserError, which names the nearest schemes, if there is none."""
    return pick("scheme", name, schemes(), "schemes")
