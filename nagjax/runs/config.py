"""Everything that defines a run, as frozen dataclasses; the command line is generated from them."""

import dataclasses
import typing
from typing import Annotated, Literal

import tyro

from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme, find_scheme

Flat = tyro.conf.arg(name="")  # the fields become options without a prefix


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Updates and their schedule. Gate parameters learn at the scheme's own relative rate, without decay."""

    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for hidden matrices; the rest stays with AdamW
    lr: float | None = None  # peak learning rate; None: the scheme's default for the model's size
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: float = 0.1  # share of the steps over which the rate rises linearly
    cooldown: float = 0.2  # share of the steps over which wsd falls linearly
    final: float = 0.1  # last learning rate relative to the peak
    weight_decay: float = 0.1  # of matrices only, times the learning rate
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # global gradient norm; 0: no clipping

    def __post_init__(self):
        if self.lr is not None and not self.lr > 0:
            raise UserError("lr", self.lr, "give a learning rate above 0")
        for field in ("warmup", "cooldown", "final"):
            if not 0.0 <= getattr(self, field) <= 1.0:
                raise UserError(field, getattr(self, field), "give a share between 0 and 1")

    def peak(self, scheme: Scheme, model: ModelConfig) -> float:
        """The peak learning rate for this scheme and size."""
        return self.lr if self.lr is not None else scheme.default_rate(model.width, model.depth)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, on how much at once, and how often to look."""

    steps: int = 300
    batch: int = 16  # sequences per step, over all devices
    accumulate: int = 1  # the batch goes through in this many parts
    seed: int = 0  # of the start values; the data order has its own, data.seed
    z_loss: float = 0.0  # weight of the squared log-normaliser
    eval_every: int = 50  # steps between evaluations
    eval_batches: int = 16  # validation batches per evaluation, always the same ones
    save_every: int = 100  # steps between checkpoints
    save_minutes: float = 0.0  # also save when so many minutes have passed since the last save; 0: never for that
    keep: int = 2  # newest checkpoints kept
    keep_best: int = 0  # checkpoints of the lowest validation loss kept besides; an evaluation among them is saved
    keep_every: int = 0  # checkpoints whose step is a multiple of this are kept besides; 0: none
    on_bad_step: Literal["raise", "skip", "rollback"] = "raise"  # loss or gradient not finite, or a spike
    spike: float = 0.0  # a loss so many robust deviations above the median of the last 64 is bad too; 0: never
    max_bad_steps: int = 5  # bad steps in a row, or rollbacks to one checkpoint, before the run gives up
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()  # besides metrics.jsonl

    def __post_init__(self):
        counts = "steps", "batch", "accumulate", "eval_every", "eval_batches", "save_every", "keep", "max_bad_steps"
        for field in counts:
            if getattr(self, field) < 1:
                raise UserError(field, getattr(self, field), "give a whole number of at least 1")
        for field in ("save_minutes", "keep_best", "keep_every", "spike"):
            if not getattr(self, field) >= 0:
                raise UserError(field, getattr(self, field), "give a number of at least 0; 0 turns it off")
        if self.batch % self.accumulate:
            raise UserError("accumulate", self.accumulate, f"batch {self.batch} must be divisible by it")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis: copies of the model, shards of its parameters, shards of its heads and features, parts
    of every sequence."""

    data: int | None = None  # None: all devices the other axes leave
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self):
        for field in ("data", "fsdp", "tensor", "sequence"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise UserError(f"mesh.{field}", value, "give a number of devices of at least 1")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run."""

    scheme: Scheme
    model: Annotated[ModelConfig, Flat] = ModelConfig()
    optimizer: Annotated[OptimizerConfig, Flat] = OptimizerConfig()
    train: Annotated[TrainConfig, Flat] = TrainConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    start: str = ""  # folder of the run whose model, scheme and parameters this one begins with; "": it begins anew

    @property
    def learning_rate(self) -> float:
        return self.optimizer.peak(self.scheme, self.model)


def to_dict(config) -> dict:
    """Plain JSON values; a scheme carries its `name`."""
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        value = to_dict(value) if dataclasses.is_dataclass(value) else value
        values[field.name] = list(value) if isinstance(value, tuple) else value
    return ({"name": config.name} if isinstance(config, Scheme) else {}) | values


def from_dict(cls: type, values: dict):
    """The inverse of `to_dict`. Nothing in `values` is executed; unknown fields are a UserError."""
    values = dict(values)
    if cls is Scheme:
        cls = find_scheme(values.pop("name"))
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := set(values) - known:
        raise UserError("config", sorted(unknown), f"{cls.__name__} has no such fields; it has {sorted(known)}")
    for name, value in values.items():
        hint = hints[name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, dict):
            values[name] = from_dict(hint, value)
        elif isinstance(value, list):
            values[name] = tuple(value)
    return cls(**values)


def flatten(values: dict, prefix: str = "") -> dict:
    """Nested config values by dotted name."""
    flat = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def differences(old: dict, new: dict) -> dict[str, tuple]:
    """Dotted names whose values differ, with both values (None where absent)."""
    old, new = flatten(old), flatten(new)
    names = sorted(old.keys() | new.keys())
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}
