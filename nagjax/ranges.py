"""The values that a field of a config may hold, declared once in its annotation: checks, help and documentation read
them there."""

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from nagjax.errors import UserError

HIDDEN = "hidden"  # marks a field that is not an option, because something else determines it
LARGEST = 2**31 - 1  # the largest whole number: what an int32 index can hold


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a field may hold: at least `ge` or above `gt`, at most `le` or below `lt`. Never NaN or
    infinite."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        """The range in words: "at least 1", "from 0 to 1", "above 0 and below 1". The limit of 32 bits is not
        mentioned."""
        if self.ge is not None and self.le not in (None, LARGEST):
            return f"from {self.ge:g} to {self.le:.10g}"
        low = f"at least {self.ge:g}" if self.ge is not None else f"above {self.gt:g}" if self.gt is not None else ""
        high = f"at most {self.le:.10g}" if self.le is not None else f"below {self.lt:g}" if self.lt is not None else ""
        return " and ".join(part for part in (low, "" if self.le == LARGEST else high) if part)


Count = Annotated[int, Range(ge=1, le=LARGEST)]
Natural = Annotated[int, Range(ge=0, le=LARGEST)]
Seed = Annotated[int, Range(ge=0, le=2**32 - 1)]
Share = Annotated[float, Range(ge=0, le=1)]
Positive = Annotated[float, Range(gt=0)]
NonNegative = Annotated[float, Range(ge=0)]
Fraction = Annotated[float, Range(gt=0, lt=1)]  # neither nothing nor all


def unwrapped(hint: Any) -> tuple[Any, bool, Range | None]:
    """A hint without `Annotated` and `| None`: the type, whether None is allowed, and its range."""
    limits = None
    if typing.get_origin(hint) is Annotated:
        limits = next((extra for extra in hint.__metadata__ if isinstance(extra, Range)), None)
        hint = hint.__origin__
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
        kind, _, inside = unwrapped(inner)
        return kind, True, inside or limits
    return hint, False, limits


def check_value(field: str, value: Any, hint: Any, fix: str = "") -> None:
    """Raises UserError unless the value has the hint's type, is among its choices and within its range; a number must
    be finite. `fix` is added to the message."""
    kind, optional, limits = unwrapped(hint)
    if value is None and optional:
        return
    if wrong := _wrong(value, kind, limits):
        none = ", or leave it out" if optional else ""
        raise UserError(field, value, f"{wrong}{none}{f'; {fix}' if fix else ''}")
    if typing.get_origin(kind) is tuple and isinstance(value, tuple):
        for item in value:
            if wrong := _wrong(item, *unwrapped(typing.get_args(kind)[0])[::2]):
                raise UserError(field, value, f"{wrong} each{f'; {fix}' if fix else ''}")


def check_each_once(field: str, names: Sequence[str], what: str) -> None:
    """Raises UserError if there are no names, or if one occurs twice. `what`: the kind of thing that is named."""
    if not names or len({*names}) < len(names):
        raise UserError(field, names, f"name at least one {what}, and no {what} twice")


def _wrong(value: Any, kind: Any, limits: Range | None) -> str:
    """What to give instead of the value; "" if the value is right."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return "" if isinstance(value, str) and value in choices else f"choose {' or '.join(map(str, choices))}"
    if typing.get_origin(kind) is tuple:
        alone = f", {(value,)!r}" if isinstance(value, str | int | float) else ""
        return "" if isinstance(value, tuple) else f"give a list of values (in Python a tuple{alone})"
    if kind is bool:
        return "" if isinstance(value, bool) else "give true or false"
    if kind in (int, float):
        name = "whole number" if kind is int else "number"
        number = numbers.Integral if kind is int else numbers.Real
        of = "of " if str(limits).startswith("at least") else ""
        told = f"give a {name} {of}{limits}".rstrip() if limits else f"give a {name}"
        if isinstance(value, bool) or not isinstance(value, number):
            return f"{told}; of an array its .item()" if hasattr(value, "item") else told
        if kind is float and not _finite(value):
            return told if limits else "give a finite number"
        if limits is not None and value not in limits:
            return f"{told}, up to {limits.le}" if limits.le == LARGEST and value > LARGEST else told
        return ""
    if kind in (str, Path):
        return "" if isinstance(value, str | Path) else "give a text"
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return "" if isinstance(value, kind) else f"give a {kind.__name__}"
    return ""


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


@cache
def field_hints(cls: type) -> dict[str, Any]:
    """The annotation of every field of a dataclass, with its range."""
    hints = typing.get_type_hints(cls, localns={"Scheme": Any}, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def check_fields(config: Any, prefix: str = "", **fixes: str) -> None:
    """Replaces NumPy's numbers in a dataclass, frozen or not, by Python's. Raises UserError for the first field with a
    value that its annotation does not allow. `prefix` is put before the field's name; `fixes` add to the message of a
    field."""
    for name, hint in field_hints(type(config)).items():
        value = getattr(config, name)
        check_value(f"{prefix}{name}", value, hint, fixes.get(name, ""))
        if (own := _of_python(value)) is not value:
            object.__setattr__(config, name, own)


def _of_python(value: Any) -> Any:
    """A NumPy number, or a tuple with some, as Python's numbers; a value that needs no change is returned as the same
    object."""
    if isinstance(value, tuple):
        own = tuple(map(_of_python, value))
        return value if all(a is b for a, b in zip(own, value, strict=True)) else own
    if isinstance(value, numbers.Number) and type(value).__module__ == "numpy":
        return value.item()
    return value
