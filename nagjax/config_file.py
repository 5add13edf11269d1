"""Runs as files: the options of a run in YAML, under their command-line names with underscores.

    scheme: nag
    depth: 48
    lr: 1e-3
    mod: {rate: 0.5}       # or mod.rate: 0.5
    data: corpus

YAML, because flax and orbax bring PyYAML wherever nagjax is installed, and because TOML has no null, which many options
accept. Only unambiguous YAML is read: null, true and false, numbers as in JSON, texts, lists and mappings; `on` and
`yes` are texts, 1e-3 is a number. Aliases, tags, names given twice and names that are not options are refused. Nothing
in a file is executed, with one exception: `tasks` may name a .yaml task of lm-evaluation-harness, which may run Python
code that lies beside it.
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
SHORT = {"data": "data.path", "scheme.name": "scheme"}  # short names in a file, and the options they stand for
LARGEST_FILE = 2**20  # bytes
NOT_AS_THEY_ARE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")  # YAML misreads or refuses them


class _Loader(yaml.SafeLoader):
    """Reads the core scalars of YAML 1.2. Raises MarkedYAMLError for aliases, tags and names given twice."""

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
    """The options that a file gives, by name (`"lr"`, `"mod.rate"`). Their values are checked later, by `read_options`.

    Raises UserError for a file that cannot be read, is larger than 1 MiB or is not such YAML; the message names the
    line.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise UserError("config", str(path), "is larger than 1 MiB: that is not a file of options")
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
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of thousands of digits
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
    """The values of a list such as `0.001, 2e-3` or `plain, nag`, each read as in a file of options. Raises UserError
    if the text is not such a list."""
    try:
        return _loaded(f"[{text}]")
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError("value", text, "is not a list of values: separate them by commas, as in 0.001,0.002") from None


def _flatten(values: Mapping[str, Any], prefix: str, flat: dict[str, Any], path: str) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _flatten(value, f"{prefix}{name}.", flat, path)
        elif f"{prefix}{name}" in flat:
            raise UserError("config", path, f"{prefix}{name} is there twice")
        else:
            flat[f"{prefix}{name}"] = value


def overridden(file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a file, replaced by those that were given separately. A preset that was given also replaces the
    sizes in the file."""
    sizes = {"depth", "width", "context"} if given.get("preset") is not None else set()
    return {name: value for name, value in file.items() if name not in sizes} | dict(given)


def config_text(options: RunOptions, given: Set[str]) -> str:
    """The text of a file of options: the `given` ones as lines, all others as comments with their defaults."""
    if "preset" in given:
        given = (given - {"preset"}) | {"depth", "width", "context"}
    lines, group = ["# nagjax train THIS_FILE [OPTIONS]: options of the command replace what is written here."], ""
    for option in run_options(options.name):
        if option.name == "preset":
            continue
        if option.group != group:
            group = option.group
            lines += ["", f"# {group}"]
        told = option.name in given or option.name == "scheme" and "start" not in given  # which brings its own
        lines.append(_line(option, options, told))
    return "\n".join(lines) + "\n"


def _line(option: Option, options: RunOptions, given: bool) -> str:
    value = options.value(option.name) if given else option.default
    return f"{'' if given else '# '}{option.name}: {_scalar(value)}  # {option.text}"


def _scalar(value: Any) -> str:
    """The value as JSON, which YAML also reads."""
    if isinstance(value, Path):
        value = str(value)
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    text = NOT_AS_THEY_ARE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.encode(errors="backslashreplace").decode()  # bytes of a path that are not UTF-8 become JSON escapes
