"""Everything that defines a run, as frozen dataclasses; the command line is generated from them."""

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.json_reader import build
from nagjax.mod.config import skips
from nagjax.model.config import ModelConfig
from nagjax.model.parametrization import Parametrization
from nagjax.ranges import (
    Count,
    Natural,
    NonNegative,
    Positive,
    Range,
    Seed,
    Share,
    check_fields,
)

if TYPE_CHECKING:  # a parser of options imports this file, and schemes import jax
    from nagjax.residual import Scheme

Momentum = Annotated[float, Range(ge=0, lt=1)]

DEFAULT_SCHEME = "nag"  # of the command line and of `nagjax.fit`


Role = Literal["matrix", "embedding", "head", "norm", "gate", "adapter"]  # of a parameter, see `nagjax.parameters`


@dataclasses.dataclass(frozen=True)
class RatesConfig:
    """Learning rates by role, relative to the peak; the model's parametrization and the scheme's own rate of its gates
    come on top. 0 keeps a role as it starts."""

    matrix: NonNegative = 1.0  # learning rate, relative to the peak, of hidden matrices
    # learning rate, relative to the peak, of the embedding tables, and of the head if it shares the table
    embedding: NonNegative = 1.0
    head: NonNegative = 1.0  # learning rate, relative to the peak, of the head, which computes the logits
    norm: NonNegative = 1.0  # learning rate, relative to the peak, of gains and biases
    gate: NonNegative = 1.0  # learning rate, relative to the peak, of gates; multiplies the scheme's own rate for them
    adapter: NonNegative = 1.0  # learning rate, relative to the peak, of LoRA's adapters

    def __post_init__(self):
        check_fields(self, "rates.")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Updates and their schedule. Gate parameters learn at the scheme's own relative rate."""

    optimizer: Literal["adamw", "muon"] = "adamw"  # update rule; muon: Muon for hidden matrices, AdamW for all else
    lr: Positive | None = None  # peak learning rate; None: the scheme's default for the model's size
    # schedule of the learning rate after the warm-up; wsd: constant, then a linear decay
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: Share = 0.1  # share of the steps in which the learning rate rises linearly
    cooldown: Share = 0.2  # wsd: share of the steps, the last ones, in which the learning rate falls linearly
    final: Share = 0.1  # cosine, wsd: share of the peak reached one step after the last, whose rate is slightly higher
    rates: RatesConfig = RatesConfig()  # learning rates by role
    weight_decay: NonNegative = 0.1  # weight decay of the roles in decay; it is multiplied by the learning rate
    decay: tuple[Role, ...] = ("matrix",)  # roles of the parameters that have weight decay
    beta1: Momentum = 0.9  # decay of the mean of the gradients; Muon always uses 0.95
    beta2: Momentum = 0.95  # decay of the mean of the gradients' squares
    epsilon: Positive = 1e-8  # AdamW's epsilon, added to the root of the mean of the gradients' squares
    clip: NonNegative = 1.0  # gradients are scaled down to at most this global norm; 0: no clipping
    # parameters that are not trained: roles, or patterns of names such as embedding.* and blocks.mlp.*
    freeze: tuple[str, ...] = ()

    def __post_init__(self):
        check_fields(self)

    def peak(self, scheme: "Scheme", model: ModelConfig) -> float:
        """The peak learning rate for this scheme and size; with a parametrization, that at its base."""
        return self.lr if self.lr is not None else Parametrization.of(model, scheme).peak(model, scheme)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, on how much at once, and how often to look."""

    steps: Count = 300  # number of training steps
    batch: Count = 16  # sequences per step, over all devices
    accumulate: Count = 1  # number of parts in which a batch is processed, one after another, to save memory
    seed: Seed = 0  # random seed of the initial values and the random router; for the order of the data see data.seed
    z_loss: NonNegative = 0.0  # weight of the z-loss, the square of the softmax's log-normaliser
    # tokens per device whose logits are in memory at once; None: 256 MiB of logits, but at least 1024 tokens
    loss_chunk: Count | None = None
    # decay of a moving average of the weights, which is then evaluated and loaded in place of the weights; 0: no
    # average
    ema: Annotated[float, Range(ge=0, lt=1)] = 0.0
    eval_every: Count = 50  # steps between evaluations
    eval_batches: Count = 16  # validation batches per evaluation, always the same ones
    # tasks that evaluations also score, separated by spaces or commas: files of questions (.jsonl), and tasks of
    # lm-evaluation-harness that ask for likelihoods (a name, or a .yaml)
    tasks: tuple[str, ...] = ()
    tasks_every: Count | None = None  # steps between task scorings, a multiple of eval_every; None: in every evaluation
    tasks_limit: Count | None = None  # ask only this many questions of each task, the first ones; None: all of them
    save_every: Count = 100  # steps between checkpoints
    save_minutes: NonNegative = 0.0  # also save when this many minutes have passed since the last save; 0: not by time
    keep: Count = 2  # number of newest checkpoints to keep
    # also keep this many checkpoints of lowest validation loss; one is saved whenever an evaluation ranks among them
    keep_best: Natural = 0
    keep_every: Natural = 0  # also keep checkpoints whose step is a multiple of this; 0: none
    # what to do at a bad step, whose loss or gradient is not finite, or whose loss spikes
    on_bad_step: Literal["raise", "skip", "rollback"] = "raise"
    spike: NonNegative = 0.0  # a loss this many robust deviations above the median of the last 64 is bad, too; 0: never
    max_bad_steps: Count = 5  # bad steps in a row, or rollbacks to one checkpoint, before the run gives up
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()  # where to write metrics, besides metrics.jsonl

    def __post_init__(self):
        check_fields(self)
        if self.batch % self.accumulate:
            raise UserError("accumulate", self.accumulate, f"batch {self.batch} must be divisible by it")
        if self.tasks_every and self.tasks_every % self.eval_every:
            fitting = -(-self.tasks_every // self.eval_every) * self.eval_every
            fix = (
                f"tasks are scored with evaluations: must be a multiple of eval_every {self.eval_every}; try {fitting}"
            )
            raise UserError("tasks_every", self.tasks_every, fix)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis: copies of the model, shards of its parameters, shards of its heads and features, parts
    of every sequence, and shards of its experts, which hold different sequences too."""

    data: Count | None = None  # number of copies of the model; None: all devices that the other axes leave
    fsdp: Count = 1  # devices that parameters and optimizer state are split over
    tensor: Count = 1  # devices that heads and features are split over
    sequence: Count = 1  # devices that the tokens of every sequence are split over
    expert: Count = 1  # devices that the experts of a Mixture-of-Experts, and the batch, are split over

    def __post_init__(self):
        check_fields(self, "mesh.")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run."""

    scheme: "Scheme"
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    start: str = ""  # folder of a run, from which this run takes model, scheme and initial parameters; "": a new model
    # Options that were given, where a run starts from another: they stand though they equal their defaults. Not saved.
    given: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self):
        Parametrization.of(self.model, self.scheme)  # raises its errors here

    @property
    def learning_rate(self) -> float:
        return self.optimizer.peak(self.scheme, self.model)


def to_dict(config) -> dict:
    """The config as plain JSON values; that of a scheme includes its `name`."""
    values = {}
    for field in (field for field in dataclasses.fields(config) if field.compare):
        value = getattr(config, field.name)
        values[field.name] = to_dict(value) if dataclasses.is_dataclass(value) else _plain(value)
    name = getattr(config, "name", None)  # a scheme's name is an attribute of its class, not a field
    return values if name is None or "name" in values else {"name": name} | values


def _plain(value: Any) -> Any:
    """A field's value as JSON has it: tuples as lists, paths as texts."""
    if isinstance(value, tuple):
        return [_plain(own) for own in value]
    if isinstance(value, os.PathLike):
        return str(value)
    return value


def from_dict[T](cls: type[T], values: Any) -> T:
    """The inverse of `to_dict`. Nothing in `values` is executed. Raises UserError naming a field that is unknown,
    missing, or not of its declared type or range."""
    if cls is not RunConfig:
        return build(cls, values)
    return build(cls, _as_it_was(values), made={"scheme": _scheme})


def _as_it_was(values: Any) -> Any:
    """Fills in what earlier versions did before there was an option for it, where the option's default differs: a
    linear router's update was multiplied by its score. Values of a wrong type are left for `build` to report."""
    parts = values if isinstance(values, dict) else {}
    model, scheme = parts.get("model"), parts.get("scheme")
    mod = model.get("mod") if isinstance(model, dict) else None
    name = scheme.get("name") if isinstance(scheme, dict) else None
    if not isinstance(model, dict) or not isinstance(mod, dict) or not isinstance(name, str):
        return values
    if not skips(mod) or "weight" in mod or mod.get("router", "auto") not in ("auto", "linear"):
        return values
    if mod.get("router", "auto") == "auto" and _scheme_class(name).router != "linear":
        return values
    return values | {"model": model | {"mod": mod | {"weight": "score"}}}


def _scheme(values: Any, where: str) -> "Scheme":
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        raise UserError(where, values, "must be one JSON object with the scheme's name")
    own = {name: value for name, value in values.items() if name != "name"}
    return build(_scheme_class(values["name"]), own, where)


def _scheme_class(name: str) -> "type[Scheme]":
    """The class of the scheme that a run names. Raises UserError, which says what to do if the scheme was registered
    elsewhere."""
    from nagjax.residual import find_scheme

    try:
        return find_scheme(name)
    except UserError as error:
        own = "a scheme of your own: install the package that brings it as an entry point (docs/write_a_scheme.md),"
        own += " open the run from Python where it is registered, or put its file into nagjax/residual/schemes/"
        raise UserError(error.field, error.value, f"{error.fix}; {own}") from None


def completed(cls: type, values: dict) -> dict:
    """The values, with defaults for the options that did not exist when they were written. Returned unchanged if this
    version cannot read them: written by a later one, changed by hand, or with a scheme registered elsewhere."""
    try:
        return to_dict(from_dict(cls, values))
    except UserError:
        return values


def flatten(values: dict, prefix: str = "") -> dict:
    """Nested config values as a flat dict by dotted name."""
    flat = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def nested(flat: dict) -> dict:
    """The inverse of `flatten`: a tree from values by dotted name, for names that contain no dots of their own."""
    values: dict = {}
    for name, value in flat.items():
        *outer, last = name.split(".")
        own = values
        for part in outer:
            own = own.setdefault(part, {})
        own[last] = value
    return values


def differences(old: dict, new: dict) -> dict[str, tuple]:
    """The dotted names whose values differ, with both values (None where absent)."""
    old, new = flatten(old), flatten(new)
    names = sorted(old.keys() | new.keys())
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}
