"""Reads what a run has logged, and derives facts from it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from nagjax.errors import UserError
from nagjax.files import has_file, inside, read_bytes, read_json
from nagjax.json_reader import build
from nagjax.mod.config import skips
from nagjax.ranges import NonNegative, Positive, Range, Share
from nagjax.runs.config import RunConfig, from_dict
from nagjax.runs.metrics import TASKS, DepthLog, EvalLog, Event, TrainLog, columns, read_metrics
from nagjax.runs.names import AVERAGED, BUNDLE, CONFIG, INFO, METRICS, ORIGIN, PRUNED, SAMPLE

LONGEST_SAMPLE = 1 << 20  # bytes

COMPILE_LINES = 3
"""Training lines left out of the step time: the first ones contain compilation."""

MADE = {PRUNED: "prune", AVERAGED: "average", ORIGIN: "import"}
"""By the file that it leaves in a folder, the command that makes a run from another run's or model's weights."""

DEAD_RATIO = 0.05
"""A sublayer whose mean update-to-stream ratio |t| is below this hardly turns the stream."""


@dataclass(frozen=True)
class _Scheme:
    name: str


@dataclass(frozen=True)
class _Model:
    depth: Annotated[int, Range(ge=1, le=2**16)]
    vocab: int | None = None


@dataclass(frozen=True)
class _Optimizer:
    lr: Positive | None


@dataclass(frozen=True)
class _Train:
    seed: int | None = None


@dataclass(frozen=True)
class _Config:
    """The fields of a run's config.json that are read here, whatever version wrote it."""

    scheme: _Scheme
    model: _Model
    optimizer: _Optimizer
    train: _Train = _Train()
    data: dict = field(default_factory=dict)


@dataclass(frozen=True)
class _Rates:
    total: Share = 0.0


@dataclass(frozen=True)
class _Info:
    parameters: NonNegative
    train_flops_per_token: NonNegative
    versions: dict = field(default_factory=dict)
    mod_rate: _Rates | None = None


@dataclass(frozen=True)
class Evaluation:
    """One validation pass."""

    step: int
    tokens: int
    loss: float
    """Nats per token."""
    bits_per_byte: float


@dataclass(frozen=True)
class DepthFacts:
    """What the last depth line says about the use of depth."""

    growth: float
    """RMS of the residual stream after the last block over that after the first: exp(mean log difference)."""
    late_turn_degrees: float
    """Mean turn angle of the last quarter of the sublayers (rounded up to at least one)."""
    dead_gates: int
    """Sublayers with mean |t| < 0.05, or with a mean that is not a number."""


@dataclass(frozen=True, eq=False)
class Run:
    """One training run, as the files in its folder describe it."""

    path: Path
    config: dict[str, Any]
    info: dict[str, Any]
    train: TrainLog
    evals: EvalLog
    depth_log: DepthLog
    events: tuple[Event, ...]
    sample: str | None
    task_log: dict[int, dict[str, float | None]] = field(default_factory=dict)
    """The scores of tasks by step: `TASK/METRIC` and its value, None if it was not finite."""

    def __repr__(self) -> str:
        facts = f"Run({str(self.path)!r}: {self.scheme}, {self.depth} blocks, step {self.step}"
        if self.evals.step.size:
            last = self.last_eval
            facts += f", validation loss {last.loss:.4f} nats per token"
            facts += f" ({last.bits_per_byte:.4f} bits per byte)" if math.isfinite(last.bits_per_byte) else ""
        return f"{facts})"

    def setting(self, name: str) -> Any:
        """The value of a dotted config field such as `"optimizer.lr"`.

        Raises `UserError` if the run's config has no such field.
        """
        value: Any = self.config
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                raise UserError(name, None, f"{self.path / CONFIG} has no such field")
            value = value[part]
        return value

    @property
    def scheme(self) -> str:
        return str(self.setting("scheme.name"))

    @property
    def depth(self) -> int:
        """The number of blocks; a block is two sublayers."""
        return int(self.setting("model.depth"))

    @property
    def lr(self) -> float | None:
        """Peak learning rate. It is the configured one; if the scheme chose it, the highest logged one, or during the
        warm-up the scheme's default. None if neither is known."""
        configured = self.setting("optimizer.lr")
        if configured is not None:
            return float(configured)
        logged = self.train.lr[np.isfinite(self.train.lr)]
        try:
            config = from_dict(RunConfig, self.config)
        except UserError:  # for example the config of a later version
            rising = False
        else:
            rising = self.step < config.optimizer.warmup * config.train.steps
        if rising:
            return config.learning_rate
        return float(logged.max()) if logged.size else None

    @property
    def tokens(self) -> int:
        """Training tokens seen when the last line was logged."""
        return max((int(log.tokens[-1]) for log in (self.train, self.evals) if log.tokens.size), default=0)

    @property
    def step(self) -> int:
        """The last logged step."""
        return max((int(log.step[-1]) for log in (self.train, self.evals) if log.step.size), default=0)

    @property
    def last_eval(self) -> Evaluation:
        """The last validation pass (not the best one). Raises `UserError` if there is none yet."""
        e = self.evals
        if not e.step.size:
            made = next((command for name, command in MADE.items() if has_file(self.path / name)), None)
            fix = "has no evaluation yet: let it train until its first eval line, then try again"
            if made is not None:
                fix = (
                    f"was made by nagjax {made} and has not trained, so that it has no log to compare: nagjax eval RUN"
                )
                fix += " gives the loss of any run, and nagjax diagnose RUN what its depth does"
            raise UserError("run", str(self.path), fix)
        return Evaluation(int(e.step[-1]), int(e.tokens[-1]), float(e.loss[-1]), float(e.bits_per_byte[-1]))

    @property
    def task_scores(self) -> dict[str, float | None]:
        """The last scores of the tasks; empty if there are none."""
        return self.task_log[max(self.task_log)] if self.task_log else {}

    @property
    def looks_ahead(self) -> bool:
        """Whether its last score is of tokens chosen by top-k, a choice that depends on later tokens. So it is in a
        routed run of an earlier version, which did not measure the causal decider."""
        return skips(self.setting("model").get("mod")) and not np.isfinite(self.evals.top_k_loss[-1:]).any()

    @property
    def step_seconds(self) -> float | None:
        """Median seconds per training step, without the first `COMPILE_LINES` lines; if there are fewer lines, of the
        last one alone. None if no time was measured or there is only one line."""
        seconds = self.train.step_seconds
        seconds = seconds[min(COMPILE_LINES, max(seconds.size - 1, 1)) :]
        seconds = seconds[np.isfinite(seconds)]
        return float(np.median(seconds)) if seconds.size else None

    @property
    def depth_facts(self) -> DepthFacts | None:
        """Facts of the last depth line; None if the run logged none."""
        log = self.depth_log
        if not log.step.size:
            return None
        turn, ratio = log.turn[-1], log.ratio[-1]
        return DepthFacts(
            growth=float(log.growth[-1]),
            late_turn_degrees=float(np.degrees(np.mean(turn[-last_quarter(turn.size) :]))),
            dead_gates=int(np.sum(~(ratio >= DEAD_RATIO))),
        )


def last_quarter(sublayers: int) -> int:
    """The number of sublayers in the last quarter of the depth, rounded up."""
    return math.ceil(sublayers / 4)


def load_run(path: str | Path) -> Run:
    """Reads the run in the folder `path`, or an exported bundle in a folder that also has the run's info.json and
    metrics.jsonl.

    If a step was logged twice, as after a resume, the later line counts. A half-written last line (the run was killed)
    and lines of an unknown kind are skipped. Raises `UserError` if `path` is not a run folder, and, naming file and
    line, if anything else in it cannot be read.
    """
    path = Path(path)
    if not path.is_dir() or not has_file(path / CONFIG):
        raise UserError("run", str(path), f"is not a run folder: give the folder that holds its {CONFIG}")
    config = _json_object(path / CONFIG, _Config, lambda value: _of_run(value, path))
    info = _json_object(path / INFO, _Info)
    logs, events = read_metrics(path / METRICS)
    sample = inside(path / SAMPLE)
    run = Run(
        path=path,
        config=config,
        info=info,
        train=columns(TrainLog, logs["train"]),
        evals=columns(EvalLog, logs["eval"]),
        depth_log=columns(DepthLog, logs["depth"]),
        events=tuple(events),
        task_log={step: _scores(line) for step, line in logs[TASKS].items()},
        sample=read_bytes(sample, largest=LONGEST_SAMPLE).decode(errors="replace") if sample.is_file() else None,
    )
    sublayers = run.depth_log.turn.shape[1] if run.depth_log.step.size else 2 * run.depth
    if sublayers != 2 * run.depth:
        raise UserError(
            "model.depth",
            run.depth,
            f"{path / METRICS} has {sublayers} sublayers per depth line, not twice that",
        )
    return run


def _scores(line: dict) -> dict[str, float | None]:
    return {name: value for name, value in line.items() if name not in ("kind", "step", "tokens")}


def _of_run(value: Any, folder: Path) -> Any:
    """The run's config inside a bundle's config.json; other values unchanged. Raises UserError for another library's
    model."""
    own = value.get(BUNDLE) if isinstance(value, dict) else None
    found = own.get("config") if isinstance(own, dict) else value
    if isinstance(found, dict) and "model_type" in found:
        raise UserError("run", str(folder), "is a model, not a run: it has no log of a training")
    return found


def _json_object(file: Path, cls: type, part: Callable[[Any], Any] = lambda value: value) -> dict[str, Any]:
    """`part` of the file's JSON value, after checking that it has the fields of `cls` with their declared types."""
    try:
        value = part(read_json(file))
        build(cls, value, others=(_Scheme, _Model, _Optimizer, _Train, _Config, _Rates, _Info))
    except FileNotFoundError:
        raise UserError("run", str(file.parent), f"has no {file.name}: was it ever started?") from None
    except ValueError as error:
        raise UserError(str(file), "", f"is not valid JSON ({error})") from None
    except OSError as error:
        raise UserError("run", str(file), f"cannot be read ({error.strerror})") from None
    except UserError as error:
        raise UserError(error.field, error.value, f"{error.fix} (in {file})") from None
    return value
