"""The options of a run: the one list of them, and the one function that makes a run's config of them, for the command
line and for `fit`."""

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nagjax.arguments import Given, Option, Rest, expanded
from nagjax.data import DataConfig
from nagjax.declared import Field, fields_of, scheme_fields
from nagjax.discovery import nearest
from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.model.presets import PRESETS, find_preset
from nagjax.ranges import check_value, unwrapped
from nagjax.runs.config import DEFAULT_SCHEME, RunConfig, TrainConfig

if TYPE_CHECKING:
    from nagjax.residual import Scheme

FLAT = ("model", "optimizer", "train")  # parts of a config whose options have no prefix
PREFIXED = ("data", "mesh")
COMMON = (  # what `--help` shows; `--help-all` shows the rest
    *("scheme", "preset", "depth", "width", "context", "steps", "batch", "lr", "seed", "data.path", "data.mix"),
    *("out", "fresh", "resume", "start", "eval_every", "save_every", "schedule", "warmup", "dtype", "remat"),
    *("mod.rate", "mesh.fsdp", "log"),
)


def own_options(fields: Iterable[Field]) -> dict[str, list[Option]]:
    """The options of a command's own parameters, by parameter, without those of a run."""
    return {field.name: expanded(field) for field in fields if field.hint not in (Given, Rest, RunOptions)}


def run_options(scheme: str = DEFAULT_SCHEME) -> list[Option]:
    """Every option of a run under this scheme. Raises UserError for an unknown scheme."""
    parts = {field.name: field for field in fields_of(RunConfig)}
    sizes = ", ".join(PRESETS)
    options = [
        Option("scheme", str, DEFAULT_SCHEME, "the residual scheme; each has --scheme.* options of its own", "run"),
        Option("preset", str | None, None, f"a size, which sets depth, width and context: {sizes}", "run"),
        Option("start", str, "", parts["start"].text, "run"),
    ]
    for field in scheme_fields(scheme):
        options += expanded(field, "scheme.", f"scheme {scheme}")
    return options + _options_of_every_scheme()


def _options_of_every_scheme() -> list[Option]:
    parts, options = {field.name: field for field in fields_of(RunConfig)}, []
    for part in FLAT:
        options += [o for field in fields_of(parts[part].hint) for o in expanded(field, "", _heading(part, field))]
    for part in PREFIXED:
        options += expanded(parts[part])
    return options


def _heading(part: str, field) -> str:
    return field.name if dataclasses.is_dataclass(field.hint) else {"train": "training"}.get(part, part)


def taken(option: str, args: Sequence[str], default: str) -> str:
    """The value of an option on which the list of other options depends; if it is given twice, the last value."""
    found = default
    for i, arg in enumerate(args):
        if arg == option and i + 1 < len(args):
            found = args[i + 1]
        elif arg.startswith(f"{option}="):
            found = arg.removeprefix(f"{option}=")
    return found


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of a run, checked. A scheme that is given by name is not made yet, so that they are available without
    jax."""

    scheme: "str | Scheme"  # a name, or a scheme with its options
    own: Mapping[str, Any]  # the --scheme.* options that were given
    parts: Mapping[str, Any]  # ModelConfig, OptimizerConfig, ... by the names they have in RunConfig
    start: str = ""
    file: str = ""  # the name, without its suffix, of the file that the options are from
    given: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # the names of the options that were given

    @property
    def model(self) -> ModelConfig:
        return self.parts["model"]

    @property
    def train(self) -> TrainConfig:
        return self.parts["train"]

    @property
    def data(self) -> DataConfig:
        return self.parts["data"]

    @property
    def name(self) -> str:
        """The name of the scheme."""
        return self.scheme if isinstance(self.scheme, str) else self.scheme.name

    @property
    def folder(self) -> Path:
        """The run's default folder. Raises UserError for a run that starts from another run, which has no default."""
        if self.start:
            raise UserError("out", None, "give a folder for the run that starts from another one")
        return Path("runs") / (self.file or f"{self.name}-d{self.model.depth}-w{self.model.width}")

    def value(self, name: str) -> Any:
        """The value of an option of `run_options`, except the preset."""
        head, _, rest = name.partition(".")
        if name in ("scheme", "start"):
            return self.name if name == "scheme" else self.start
        if head == "scheme":
            return self.own[rest] if rest in self.own else getattr(self.scheme, rest)
        if head in PREFIXED:
            return operator.attrgetter(rest)(self.parts[head])
        return operator.attrgetter(name)(next(part for part in self.parts.values() if hasattr(part, head)))

    def __str__(self) -> str:
        model, train = self.model, self.train
        if self.start:  # scheme and context are those of the starting run
            return f"the model of {self.start}, {train.steps:,} steps of {train.batch} sequences"
        size, tokens = f"{model.depth} blocks x {model.width}", train.batch * model.context
        return f"{self.name}, {size}, {train.steps:,} steps of {train.batch} x {model.context} = {tokens:,} tokens"

    def config(self) -> RunConfig:
        """The run's config. Imports jax, because schemes do."""
        from nagjax.residual import find_scheme

        if isinstance(self.scheme, str):
            made = find_scheme(self.scheme)(**self.own)
        else:
            made = dataclasses.replace(self.scheme, **self.own)
        return RunConfig(scheme=made, start=self.start, given=self.given, **self.parts)


def read_options(given: Mapping[str, Any], file: str = "", beside: Iterable[str] = ()) -> RunOptions:
    """Checks options and returns them. Names are those of the command line, with underscores (`"lr"`, `"mod.rate"`).

    A group may be given as its dataclass or as a dict (`mesh={"fsdp": 8}`, `mod=ModConfig(...)`, `data` also as the
    path alone), and `scheme` as a name or as a scheme with its options. beside: names of the caller's other arguments,
    which are suggested for an unknown name, too.

    Raises UserError for an unknown option, with the nearest name or else all names, and for a value that the option
    does not allow.
    """
    values = _flat(given)
    preset = values.pop("preset", None)
    if preset is not None:
        check_value("preset", preset, str)
        values = dataclasses.asdict(find_preset(preset)) | values
    names = tuple(values)
    scheme, start = values.pop("scheme", DEFAULT_SCHEME), values.pop("start", None) or ""
    check_value("start", start, str)
    if not dataclasses.is_dataclass(scheme):
        check_value("scheme", scheme, str)
    own = {name.removeprefix("scheme."): values.pop(name) for name in list(values) if name.startswith("scheme.")}
    fields = scheme_fields(scheme) if isinstance(scheme, str) else fields_of(type(scheme))
    hints = {field.name: field.hint for field in fields}
    _refuse_unknown({f"scheme.{name}": value for name, value in own.items()}, {f"scheme.{name}" for name in hints})
    for name, value in own.items():
        check_value(f"scheme.{name}", value, hints[name])
    parts = {field.name: field.hint for field in fields_of(RunConfig) if field.name in (*FLAT, *PREFIXED)}
    prefixes = {part: f"{part}." if part in PREFIXED else "" for part in parts}
    _refuse_unknown(
        values, {option.name for option in _options_of_every_scheme()}, [*beside, *(f"scheme.{name}" for name in hints)]
    )
    made = {part: _made(cls, values, prefixes[part]) for part, cls in parts.items()}
    return RunOptions(scheme, own, made, str(start), file, names)


def options_of_run(config: RunConfig) -> tuple[RunOptions, set[str]]:
    """The options of a run, and the names of those that are needed to make it: all that differ from their defaults,
    except sizes that follow from the others and would also do so at another width."""
    parts = {part: getattr(config, part) for part in (*FLAT, *PREFIXED)}
    own = {field.name: getattr(config.scheme, field.name) for field in dataclasses.fields(config.scheme)}
    found = RunOptions(config.scheme.name, own, parts, config.start)
    changed = {o.name for o in run_options(found.name) if o.name != "preset" and found.value(o.name) != o.default}
    return found, {name for name in changed if not config.model.follows(name)}


def _flat(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options without groups: a dict or a dataclass under a group's name becomes its fields. Raises UserError for an
    option that is given twice."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if f"{prefix}{name}" == "data" and not dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
            name, value = "data.path", str(value)
        if dataclasses.is_dataclass(value) and not hasattr(value, "advance"):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        found = _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        for twice in flat.keys() & found.keys():
            raise UserError(twice, found[twice], f"was given as {flat[twice]!r}, too: give one of them")
        flat |= found
    return flat


def _refuse_unknown(values: Mapping[str, Any], known: set[str], others: Iterable[str] = ()) -> None:
    """Raises UserError for a name that is not known. others: further names to suggest."""
    for name, value in values.items():
        if name not in known:
            if inner := [option for option in sorted(known) if option.startswith(f"{name}.")]:
                fix = f"is a group: give a dict of its options, {name}={{...}}, or {', '.join(inner)} by name"
                raise UserError(name, value, fix)
            meant = nearest(name, [*sorted(known), *others])
            every = "nagjax train --help-all lists every option"
            listed = f"is not an option; known: {', '.join(sorted(known))}"
            raise UserError(name, value, meant + every if meant else listed)


def _made(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    chosen = {}
    for field in fields_of(cls):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(field.hint):
            chosen[field.name] = _made(field.hint, values, f"{name}.")
        elif name in values:
            chosen[field.name] = _tupled(values[name], unwrapped(field.hint)[0])
    return cls(**chosen)


def _tupled(value: Any, kind: Any) -> Any:
    """A tuple of one value or of a list of values, if the field holds a tuple; otherwise the value itself."""
    if getattr(kind, "__origin__", None) is not tuple or value is None:
        return value
    return tuple(value) if isinstance(value, list | tuple) else (value,)
