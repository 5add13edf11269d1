"""Functions as commands: reads the options of a function or a dataclass from arguments, and makes their help.

A parameter's type and range are its annotation. Its text is its line under `Args:` in the docstring; for a field of a
dataclass it is the field's comment. A dataclass as a parameter stands for its fields, `--NAME.FIELD`. Names have dots
and underscores in Python and in errors, dashes on the command line.
"""

import argparse
import dataclasses
import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from nagjax.declared import REQUIRED, Field, fields_of
from nagjax.discovery import nearest
from nagjax.errors import UserError
from nagjax.ranges import HIDDEN, check_value, unwrapped

POSITIONAL = "positional"
READABLE = (bool, int, float, str, Path)


class Given(dict[str, Any]):
    """Type of a parameter that receives the options that were given, by name."""

    def refuse(self, names: Iterable[str], fix: str) -> None:
        """Raises UserError for the first of these options that was given, because it would have no effect."""
        for name in names:
            if name in self:
                value = self[name]
                raise UserError(name, str(value) if isinstance(value, Path) else value, fix)


class Rest(tuple):
    """Type of a parameter that receives the arguments after `--`."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option; `default` is REQUIRED if it must be given."""

    name: str
    hint: Any
    default: Any
    text: str
    group: str = ""

    @property
    def positional(self) -> bool:
        return typing.get_origin(self.hint) is Annotated and POSITIONAL in self.hint.__metadata__

    @property
    def kind(self) -> Any:
        """The type of a value; of each value if there may be several."""
        kind = unwrapped(self.hint)[0]
        return typing.get_args(kind)[0] if self.several else kind

    @property
    def several(self) -> bool:
        return typing.get_origin(unwrapped(self.hint)[0]) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        kind = unwrapped(self.kind)[0]
        return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of the command line. A switch has two, the second of which turns it off."""
        if self.positional:
            return ()
        name = self.name.replace("_", "-")
        group, dot, field = name.rpartition(".")
        return (f"--{name}", f"--{group}{dot}no-{field}") if self.kind is bool else (f"--{name}",)

    @property
    def told(self) -> str:
        """The text, with the default and the range."""
        limits = unwrapped(self.kind)[2] if self.several else unwrapped(self.hint)[2]
        default = " ".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        facts = [] if self.default in (REQUIRED, None, ()) or default == "" else [f"default {_shown(default)}"]
        facts += [str(limits)] if limits and str(limits) else []
        return self.text + (f" ({'; '.join(facts)})" if facts else "")

    @property
    def signature(self) -> str:
        """The first flag and a placeholder for its value; for a switch both flags; for a positional option its name."""
        kind = unwrapped(self.kind)[0]
        names = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}
        value = "|".join(self.choices) or names.get(kind, "VALUE")
        if self.positional:
            return self.name.upper() + (" ..." if self.several else "")
        if kind is bool:
            return " / ".join(self.flags)
        return f"{self.flags[0]} {value}" + (" ..." if self.several else "")


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value}"


def expanded(field: Field, prefix: str = "", group: str = "") -> list[Option]:
    """The options of a field: one, or those of the dataclass that it holds. A hidden field has none."""
    if typing.get_origin(field.hint) is Annotated and HIDDEN in field.hint.__metadata__:
        return []
    if dataclasses.is_dataclass(field.hint):
        inner = f"{prefix}{field.name}."
        return [option for part in fields_of(field.hint) for option in expanded(part, inner, group or field.name)]
    return [Option(f"{prefix}{field.name}", field.hint, field.default, field.text, group)]


def options_of(cls: type) -> list[Option]:
    """A dataclass's fields as options, without fields whose value cannot be given as one word."""
    options = [option for field in fields_of(cls) for option in expanded(field)]
    return [option for option in options if option.choices or unwrapped(option.kind)[0] in READABLE]


def parameters(function: Callable) -> list[Field]:
    """A function's parameters, with their texts from its docstring."""
    hints, texts = typing.get_type_hints(function, include_extras=True), _texts(function.__doc__ or "")
    empty = inspect.Parameter.empty
    return [
        Field(name, hints[name], REQUIRED if p.default is empty else p.default, texts.get(name, ""))
        for name, p in inspect.signature(function).parameters.items()
    ]


def _texts(doc: str) -> dict[str, str]:
    """The texts under `Args:`, by parameter."""
    _, _, args = inspect.cleandoc(doc).partition("\nArgs:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", args, re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for name, text in found}


def description(function: Callable) -> str:
    """The docstring up to `Args:`."""
    return inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[0].strip()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        named = re.match(r"argument (\S+?):? (.*)", message)
        if named:
            raise UserError(named[1].split("/")[0], "", f"{named[2]}; see {self.prog} --help-all")
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            raise UserError(missing.split(", ")[0], None, f"is missing; see {self.prog} --help")
        raise UserError("arguments", "", f"{message}; see {self.prog} --help")


def parse(options: Sequence[Option], args: Sequence[str], prog: str) -> dict[str, Any]:
    """The values that the arguments give, by the names of the options. Raises UserError for unknown or missing options
    and for values that an option does not allow."""
    parser = _Parser(prog=prog, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for option in options:
        if option.kind is bool:
            on, off = option.flags
            parser.add_argument(on, dest=option.name, action="store_true")
            parser.add_argument(off, dest=option.name, action="store_false")
            continue
        names = [option.name] if option.positional else [option.flags[0]]
        settings = {} if option.positional else {"dest": option.name}
        count = ("+" if option.default is REQUIRED and option.positional else "*") if option.several else None
        if option.positional and option.default is not REQUIRED and not option.several:
            count = "?"
        parser.add_argument(*names, type=_reader(option), nargs=count, **settings)
    _refuse_values_of_switches(options, args)
    given, unknown = parser.parse_known_args(list(args))
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(given).items()}
    for wrong in unknown:
        if wrong.startswith("-"):
            flags = [flag for option in options for flag in option.flags]
            every = "--help-all" if len(options) > FEW else "--help"
            raise UserError("option", wrong, f"{nearest(wrong.split('=')[0], flags)}{prog} {every} lists what there is")
        raise UserError("arguments", wrong, f"is one too many; see {prog} --help")
    for option in options:
        if option.name in values:
            check_value(option.name, values[option.name], option.hint)
        elif option.default is REQUIRED:
            raise UserError(option.name, None, f"is missing: give {option.signature}")
    return values


def _refuse_values_of_switches(options: Sequence[Option], args: Sequence[str]) -> None:
    switches = {flag: option for option in options if option.kind is bool for flag in option.flags}
    for arg, following in zip(args, [*args, ""][1:], strict=True):
        flag, equals, value = arg.partition("=")
        value = value if equals else following if following.lower() in ("true", "false") else None
        if flag in switches and value is not None:
            raise UserError(flag, value, f"takes no value: give {' or '.join(switches[flag].flags)} alone")


def _reader(option: Option) -> Callable[[str], Any]:
    kind, none, _ = unwrapped(option.kind)
    none = none or unwrapped(option.hint)[1]

    def read(text: str) -> Any:
        if text is argparse.SUPPRESS:  # a positional option that was left out
            return text
        if none and text == "None":
            return None
        try:
            return kind(text) if kind in (int, float, Path) else text
        except ValueError:
            check_value(option.name, text, option.kind if option.several else option.hint)
            raise

    return read


FEW = 30  # options that fit on one screen of help


def help_text(
    prog: str, text: str, options: Sequence[Option], common: Iterable[str] = (), everything: bool = True
) -> str:
    """The help of a command: with `everything` all options by group, otherwise the positional ones and the `common`
    ones."""
    width = max(40, min(shutil.get_terminal_size().columns, 120))
    positional = [option for option in options if option.positional]
    shown = [option for option in options if not option.positional and (everything or option.name in set(common))]
    if not everything:
        order = list(common)
        shown.sort(key=lambda option: order.index(option.name))
    usage = " ".join(["usage:", prog, *(option.signature for option in positional), "[OPTIONS]"])
    lines = [usage, "", *_paragraphs(text, width)]
    groups: dict[str, list[Option]] = {"": positional}
    for option in shown:
        groups.setdefault(option.group if everything else "options", []).append(option)
    for group, members in groups.items():
        if members:
            lines += ["", *([f"{group}:"] if group else [])]
            lines += [line for option in members for line in _entry_of(option.signature, option.told, width)]
    lines += _entry_of("-h, --help", "show this", width)
    if not everything:
        lines += _entry_of("--help-all", f"show all {len(options)} options", width)
    return "\n".join(lines)


def _paragraphs(text: str, width: int) -> list[str]:
    parts = [textwrap.fill(" ".join(part.split()), width) for part in text.split("\n\n")]
    return "\n\n".join(parts).split("\n")


def _entry_of(head: str, text: str, width: int, column: int = 28) -> list[str]:
    lines = textwrap.wrap(text, width - column)
    head = f"  {head}"
    if len(head) < column - 1 and lines:
        return [f"{head:{column}}{lines[0]}", *(" " * column + line for line in lines[1:])]
    return [head, *(" " * column + line for line in lines)]
