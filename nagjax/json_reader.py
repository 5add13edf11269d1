"""Reads JSON that somebody else may have made: within limits and in declared types, otherwise it is refused with a
one-line message. All JSON that nagjax parses goes through this module."""

import dataclasses
import json
import math
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO

from nagjax.errors import UserError
from nagjax.ranges import check_value, field_hints, unwrapped

LARGEST = 1 << 26  # bytes of one value, unless its reader allows more
LONGEST_LINE = 1 << 24  # bytes of one line of a log
DEEPEST = 100  # levels of nested lists and objects
WHOLE = 1 << 64  # whole numbers must be smaller in magnitude
_TOO_DEEP = f"it is nested more than {DEEPEST} deep"
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(content: str | bytes, *, lenient: bool = False) -> Any:
    """The value of a JSON text. Bytes are read as UTF-8 (with or without a byte order mark).

    Raises ValueError for text that is not JSON or is nested more than `DEEPEST` deep. Unless `lenient`, also for NaN
    and infinities, whole numbers of more than 64 bits, a field that occurs twice, and half a surrogate pair. `lenient`
    is for files in which other programs have written such values beside the field that is wanted.
    """
    text = content if isinstance(content, str) else content.decode("utf-8-sig")
    try:
        value = (_LENIENT if lenient else _STRICT).decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level, depth = [value], 0
    while level := [outer for outer in level if isinstance(outer, dict | list)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(_TOO_DEEP)
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    if not lenient:
        _refuse_halves(text, value)
    return value


def _refuse_halves(text: str, value: Any) -> None:
    """Raises ValueError if a text holds half a surrogate pair, which cannot be encoded in UTF-8."""
    if _HALF_PAIR.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError, a ValueError


def _whole(digits: str) -> int:
    if len(digits) > 21 or abs(int(digits)) >= WHOLE:
        raise ValueError(f"a whole number of {len(digits)} digits: it must have 64 bits")
    return int(digits)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the field {twice[:60]!r} is there twice")
    return found


_LENIENT = json.JSONDecoder()
_STRICT = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_finite, object_pairs_hook=_once)


def read(file: BinaryIO, *, largest: int = LARGEST, lenient: bool = False) -> Any:
    """The value in an open file. Raises ValueError as `parse_json` does, and for more than `largest` bytes."""
    content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    return parse_json(content, lenient=lenient)


def read_lines(file: BinaryIO, name: str, largest: int = LONGEST_LINE) -> Iterator[tuple[int, Any]]:
    """The values of a log of JSON lines, with their line numbers from 1. NaN is allowed, since measurements may be NaN.
    Empty lines are skipped, and so is an unfinished last line. Raises UserError with `name` and the line number for any
    other damage."""
    number = 0
    while line := file.readline(largest + 1):
        number += 1
        if not line.strip():
            continue
        try:
            if len(line) > largest:
                raise ValueError(f"it has more than {largest:,} bytes")
            text = line.decode("utf-8-sig")
            value = parse_json(text, lenient=True)
            _refuse_halves(text, value)
        except ValueError as error:
            if not line.endswith(b"\n") and len(line) <= largest:
                return
            raise damaged_line(name, number, line, f"is not valid JSON ({error})") from None
        yield number, value


def damaged_line(name: str, number: int, line: bytes, complaint: str) -> UserError:
    shown = line[:60].decode("utf-8", "replace").rstrip("\n")
    return UserError(f"{name}:{number}", shown, f"{complaint}: repair or remove this line")


def build[T](
    cls: type[T],
    values: Any,
    where: str = "",
    *,
    others: Collection[type] = (),
    made: Mapping[str, Callable[[Any, str], Any]] | None = None,
) -> T:
    """Makes a dataclass from a JSON object; every field must have the type and range that its annotation declares.

    `where` is a prefix of the fields' names in messages. `others`: classes whose objects may have unknown fields, which
    are ignored. `made`: by field, a function that makes its value from the JSON value and the field's name. Raises
    UserError for a field that is unknown, missing, or has a value that is not allowed.
    """
    hints, named = field_hints(cls), f"{where}." if where else ""
    if not isinstance(values, dict):
        raise UserError(where or cls.__name__, values, "must be one JSON object")
    if (unknown := sorted(set(values) - set(hints))) and cls not in others:
        raise UserError(where or "config", unknown, f"{cls.__name__} has no such fields; it has {sorted(hints)}")
    fields = [field for field in dataclasses.fields(cls) if field.init]
    for field in fields:
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and field.name not in values:
            raise UserError(f"{named}{field.name}", None, "is missing")
    given = {}
    for field in fields:
        if field.name in values:
            make = (made or {}).get(field.name) or partial(_converted, hint=hints[field.name], others=others)
            given[field.name] = make(values[field.name], f"{named}{field.name}")
    return cls(**given)


def _converted(value: Any, where: str, hint: Any, others: Collection[type]) -> Any:
    kind, optional, _ = unwrapped(hint)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if value is None and optional:
        return None
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, where, others=others)
    if origin is list or (origin is tuple and isinstance(value, list)):
        if not isinstance(value, list):
            raise UserError(where, value, "must be a list")
        made = [_converted(one, f"{where}[{i}]", inner[0], others) for i, one in enumerate(value)]
        if origin is list:
            return made
        value = tuple(made)
    if kind is dict or origin is dict:
        if not isinstance(value, dict):
            raise UserError(where, value, "must be one JSON object")
        if not inner:
            return value
        return {name: _converted(one, f"{where}.{name}", inner[1], others) for name, one in value.items()}
    check_value(where, value, hint)
    return value
