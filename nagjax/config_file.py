"""Runs as files: the options of a run in YAML, by the names they have on the command line, with underscores.

    scheme: nag
    depth: 48
    lr: 1e-3
    mod: {rate: 0.5}       # or mod.rate: 0.5
    data: corpus

YAML, because flax and orbax bring PyYAML wherever nagjax is, and because TOML has no null, which many options may be.
Of YAML only what says one thing: null, true and false, numbers as in JSON, texts, lists and mappings; `on` and `yes`
are texts, 1e-3 is a number. Nothing in a file is executed; but a .yaml task of lm-evaluation-harness that its `tasks`
name may name Python code beside it, which runs. Aliases, tags, names given twice and names that are no options are
refused.
"""

import json
import os
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import yaml

from nagjax.arguments import Option
from nagjax.errors import UserError
from nagjax.options import RunOptions, run_options
from nagjax.ranges import check_value

SUFFIXES = (".yaml", ".yml")
SHORT = {"data": "data.path", "scheme.name": "scheme"}  # what a file may call an option, and its name
LARGEST_FILE = 2**20  # bytes
NOT_AS_THEY_ARE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")  # YAML takes them for something else, or not


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core scalars; no aliases, no name twice."""

    yaml_implicit_resolvers: dict = {}

    def compose_node(self, parent, index):
        event = self.peek_event()
        told = "an alias" if isinstance(event, yaml.AliasEvent) else f"a tag, {event.tag}" if event.tag else ""
        if told:
            raise yaml.MarkedYAMLError(problem=f"{told}: write the value out", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        seen = set()
        for i, name in enumerate(names):
            mark = node.value[i][0].start_mark
            if not isinstance(name, str):
                raise yaml.MarkedYAMLError(problem=f"{name!r} is not a name", problem_mark=mark)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"{name} is there twice", problem_mark=mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


for tag, pattern, first in (
    ("null", r"(?:null|~|)", ["n", "~", ""]),
    ("bool", r"(?:true|false)", "tf"),
    ("int", r"-?(?:0|[1-9][0-9]*)", "-0123456789"),
    ("float", r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?", "-0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"^{pattern}$"), list(first))


def _loaded(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)


def is_config_file(word: str) -> bool:
    """Whether an argument names a file of options."""
    return not word.startswith("-") and word.lower().endswith(SUFFIXES)


def read_config_file(path: str | os.PathLike) -> dict[str, Any]:
    """The options that a file gives, by name (`"lr"`, `"mod.rate"`); what they may be is checked by `read_options`.

    Raises UserError for a file that cannot be read, is larger than 1 MiB or is not such YAML, naming the line.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise UserError("config", str(path), "is larger than 1 MiB: that is no file of options")
        found = _loaded(data.decode())
    except OSError as error:
        fix = f"cannot be read ({error.strerror}); nagjax config prints a file to begin with"
        raise UserError("config", str(path), fix) from None
    except UnicodeDecodeError:
        raise UserError("config", str(path), "is not UTF-8") from None
    except RecursionError:
        raise UserError("config", str(path), "is nested too deep: options are names and values") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise UserError("config", str(path), f"{line}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # the second: a number of thousands of digits
        raise UserError("config", str(path), f"is not YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UserError("config", str(path), f"is a {type(found).__name__}: write one option a line, as lr: 0.001")
    flat: dict[str, Any] = {}
    _flatten(found, "", flat, str(path))
    for short, name in SHORT.items():
        if short in flat and name in flat:
            raise UserError("config", str(path), f"{name} is there twice")
    flat = {SHORT.get(name, name): value for name, value in flat.items()}
    check_value("scheme", flat.get("scheme", ""), str)
    return flat


def read_values(text: str) -> list[Any]:
    """The values of a list such as `0.001, 2e-3` or `plain, nag`, each as a file of options would have it. Raises
    UserError."""
    try:
        return _loaded(f"[{text}]")
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError("value", text, "is no list of values: separate them by commas, as in 0.001,0.002") from None


def _flatten(values: Mapping[str, Any], prefix: str, flat: dict[str, Any], path: str) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _flatten(value, f"{prefix}{name}.", flat, path)
        elif f"{prefix}{name}" in flat:
            raise UserError("config", path, f"{prefix}{name} is there twice")
        else:
            flat[f"{prefix}{name}"] = value


def overridden(file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A file's options with those that were given besides. A preset that was given stands for the sizes in it."""
    sizes = {"depth", "width", "context"} if given.get("preset") is not None else set()
    return {name: value for name, value in file.items() if name not in sizes} | dict(given)


def config_text(options: RunOptions, given: Set[str]) -> str:
    """A file of these options: those given, as lines, all others as comments with their defaults."""
    if "preset" in given:
        given = (given - {"preset"}) | {"depth", "width", "context"}
    lines, group = ["# nagjax train THIS_FILE [OPTIONS]: options of the command replace what is written here."], ""
    for option in run_options(options.name):
        if option.name == "preset":
            continue
        if option.group != group:
            group = option.group
            lines += ["", f"# {group}"]
        lines.append(_line(option, options, option.name in given or option.name == "scheme"))
    return "\n".join(lines) + "\n"


def _line(option: Option, options: RunOptions, given: bool) -> str:
    value = options.value(option.name) if given else option.default
    return f"{'' if given else '# '}{option.name}: {_scalar(value)}  # {option.text}"


def _scalar(value: Any) -> str:
    """As JSON, which YAML understands."""
    if isinstance(value, Path):
        value = str(value)
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    text = NOT_AS_THEY_ARE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.encode(errors="backslashreplace").decode()  # a path's bytes that are no UTF-8: JSON's own escapes
