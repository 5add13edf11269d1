"""Options of a run on the command line: the scheme is chosen first, because it brings options of its own."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.model.presets import find_preset
from nagjax.residual import find_scheme
from nagjax.runs.config import Flat, MeshConfig, OptimizerConfig, RunConfig, TrainConfig

DEFAULT_SCHEME = "nag"


def take(option: str, args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Removes `option VALUE` or `option=VALUE` from the arguments; the value, or None."""
    args = list(args)
    for i, arg in enumerate(args):
        if arg == option:
            if i + 1 == len(args):
                raise UserError(option, "", "needs a value")
            return args[i + 1], args[:i] + args[i + 2 :]
        if arg.startswith(f"{option}="):
            return arg.removeprefix(f"{option}="), args[:i] + args[i + 1 :]
    return None, args


def parse(target: Any, args: Sequence[str], prog: str, description: str | None = None) -> Any:
    """Calls a function, or builds a dataclass, from command-line arguments."""
    return tyro.cli(target, args=list(args), prog=f"nagjax {prog}", description=description)


def parse_run(args: Sequence[str], prog: str, description: str, extra: Sequence[tuple] = ()) -> tuple[RunConfig, Any]:
    """The run config, and an object holding the `extra` fields (tuples as for `dataclasses.make_dataclass`)."""
    name, args = take("--scheme", args)
    preset, args = take("--preset", args)
    if preset is not None:
        args = find_preset(preset).arguments() + args
    parts = [
        ("scheme", find_scheme(name or DEFAULT_SCHEME)),
        ("model", Annotated[ModelConfig, Flat]),
        ("optimizer", Annotated[OptimizerConfig, Flat]),
        ("train", Annotated[TrainConfig, Flat]),
        ("data", DataConfig),
        ("mesh", MeshConfig),
    ]
    given = parse(dataclasses.make_dataclass("Options", [*parts, *extra]), args, prog, description)
    start = {"start": str(given.start)} if getattr(given, "start", None) else {}
    return RunConfig(**{part: getattr(given, part) for part, _ in parts}, **start), given
