"""What a comparison is run on, written once: the shapes of models with their budgets, and how many seeds and rates."""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from nagjax.errors import UserError
from nagjax.model.presets import find_preset
from nagjax.ranges import HIDDEN, Count, Natural, Positive, Range, check_fields


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and what it is trained on. `lr`: middle of the grid; None: each scheme's own for the model's size."""

    depth: Count  # blocks
    width: Count
    context: Count
    batch: Count  # sequences per step
    steps: Count
    hidden: Count | None = None
    heads: Count | None = None
    lr: Positive | None = None
    remat: Literal["none", "block", "dots", "offload"] = "none"
    title: str = ""  # instead of its sizes

    @property
    def tokens(self) -> int:
        return self.steps * self.batch * self.context

    @property
    def name(self) -> str:
        """The name of the shape in job folders and tables; unique among the shapes of a size."""
        return self.title or f"{self.depth}x{self.width}-{brief(self.tokens)}"


def brief(count: float) -> str:
    """A count in short form: 61440 as 61k, 2097152 as 2.1M."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            value = count / unit
            return f"{value:.0f}{letter}" if value >= 10 else f"{value:.1f}".removesuffix(".0") + letter
    return f"{count:g}"


@dataclasses.dataclass(frozen=True)
class Settings:
    """A size of a comparison. The rates are tried on seed 0; what is compared are fresh seeds, from `first_seed` on:
    those below it were looked at while the arms were chosen."""

    shapes: tuple[Shape, ...]
    seeds: Natural  # fresh ones
    arms: tuple[str, ...] = ()  # of the recipe's; none: all
    factors: tuple[Positive, ...] = (0.5, 1.0, 2.0)  # of the middle rate, to begin with; one: no tuning
    widest: Annotated[float, Range(ge=1)] = 64.0  # no factor above it, nor below its inverse
    match: Literal["tokens", "flops"] = "tokens"  # flops: of the first arm at that shape
    eval_batches: Count = 24
    looks: Count = 4  # evaluations and checkpoints on the way
    data: str = "stdlib"  # or a folder made by nagjax data prepare
    first_seed: Annotated[Count, HIDDEN] = 1  # of the fresh ones; rates are tried on seed 0
    tasks: tuple[str, ...] = ()  # scored at the end of every run: files of questions, names of lm-evaluation-harness

    def __post_init__(self):
        if len({shape.name for shape in self.shapes}) < len(self.shapes):
            raise UserError("shapes", [shape.name for shape in self.shapes], "give each a title of its own")
        check_ascending("factors", self.factors)


def check_ascending(field: str, values: Sequence[float]) -> None:
    """Raises UserError unless there are values, each larger than the one before."""
    if not values or list(values) != sorted({*values}):
        raise UserError(field, values, "give at least one, in ascending order")


def check_settings(settings: Any) -> None:
    """Raises UserError for a value that its field's annotation does not allow, and for a list that has one twice, which
    would make two jobs of one name."""
    check_fields(settings)
    for field, values in vars(settings).items():
        if isinstance(values, tuple) and len({*values}) < len(values):
            raise UserError(field, values, "name each once")


def crossed(depths: Sequence[int], width: int, context: int, batch: int, *steps: int, **more: Any) -> tuple[Shape, ...]:
    """A shape for every depth and number of steps."""
    return tuple(Shape(depth, width, context, batch, count, **more) for count in steps for depth in depths)


def preset(name: str, batch: int, steps: int) -> tuple[Shape]:
    """The shape of one of nagjax's presets."""
    return (Shape(**dataclasses.asdict(find_preset(name)), batch=batch, steps=steps),)


def from_json(kind: type, values: dict[str, Any]) -> Any:
    """Settings of a recipe from their JSON form."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: _typed(hints[name], value) for name, value in values.items()})


def _typed(hint: Any, value: Any) -> Any:
    if isinstance(value, list | tuple):
        inner = (typing.get_args(hint) or (Any,))[0]
        return tuple(_typed(inner, part) for part in value)
    return from_json(hint, value) if isinstance(value, dict) and dataclasses.is_dataclass(hint) else value
