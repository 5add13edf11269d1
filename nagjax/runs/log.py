"""Reading a run folder: what was configured, what was measured, and the facts that follow from it.

A run folder holds `config.json`, `info.json`, `metrics.jsonl` and perhaps `sample.txt`. This file is the one
place that knows their layout.
"""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from nagjax.errors import UserError

COMPILE_LINES = 3
"""Training lines left out of the step time: the first ones contain compilation."""

DEAD_RATIO = 0.05
"""A sublayer whose mean update-to-stream ratio |t| is below this hardly turns the stream: a dead gate."""

_OPTIONAL = {"mfu", "accuracy"}


@dataclass(frozen=True, eq=False)
class TrainLog:
    """Training lines in step order, one entry per logged step. What was not measured is NaN."""

    step: Int[np.ndarray, "N"]
    tokens: Int[np.ndarray, "N"]
    loss: Float[np.ndarray, "N"]
    """Nats per token."""
    grad_norm: Float[np.ndarray, "N"]
    lr: Float[np.ndarray, "N"]
    tokens_per_second: Float[np.ndarray, "N"]
    step_seconds: Float[np.ndarray, "N"]
    mfu: Float[np.ndarray, "N"]
    """Model FLOPs utilisation, between 0 and 1."""


@dataclass(frozen=True, eq=False)
class EvalLog:
    """Validation lines in step order. What was not measured is NaN."""

    step: Int[np.ndarray, "N"]
    tokens: Int[np.ndarray, "N"]
    loss: Float[np.ndarray, "N"]
    """Nats per token."""
    bits_per_byte: Float[np.ndarray, "N"]
    accuracy: Float[np.ndarray, "N"]


@dataclass(frozen=True, eq=False)
class DepthLog:
    """Per-sublayer telemetry in step order; sublayers 2i and 2i+1 are attention and MLP of block i."""

    step: Int[np.ndarray, "N"]
    log_norm: Float[np.ndarray, "N S+1"]
    """Log of the residual stream's RMS before each sublayer, and after the last."""
    turn: Float[np.ndarray, "N S"]
    """Mean angle by which the sublayer turns the stream, in radians."""
    ratio: Float[np.ndarray, "N S"]
    """Mean ratio of update norm to stream norm, |t|."""
    gate: Float[np.ndarray, "N S"]
    """Mean gate. NaN where the scheme has none."""
    closed: Float[np.ndarray, "N S"]
    """Share of tokens whose gate is below 0.05. NaN where the scheme has none."""


@dataclass(frozen=True)
class Event:
    """Something that happened to the run: a resume, a skipped step."""

    step: int
    message: str


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
    """Sublayers with mean |t| < 0.05; a ratio that is not a number counts as dead."""


@dataclass(frozen=True, eq=False)
class Run:
    """One training run, as its folder tells it."""

    path: Path
    config: dict[str, Any]
    info: dict[str, Any]
    train: TrainLog
    evals: EvalLog
    depth_log: DepthLog
    events: tuple[Event, ...]
    sample: str | None

    def __repr__(self) -> str:
        facts = f"Run({str(self.path)!r}: {self.scheme}, {self.depth} blocks, step {self.step}"
        if self.evals.step.size:
            last = self.last_eval
            facts += f", validation loss {last.loss:.4f} nats per token ({last.bits_per_byte:.4f} bits per byte)"
        return f"{facts})"

    def setting(self, name: str) -> Any:
        """The value of a dotted config field such as `"optimizer.lr"`.

        Raises `UserError` when the run's config has no such field.
        """
        value: Any = self.config
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                raise UserError(name, None, f"{self.path / 'config.json'} has no such field")
            value = value[part]
        return value

    @property
    def scheme(self) -> str:
        return str(self.setting("scheme.name"))

    @property
    def depth(self) -> int:
        """Blocks; a block is two sublayers."""
        return int(self.setting("model.depth"))

    @property
    def lr(self) -> float | None:
        """Peak learning rate: the configured one, or the highest logged where the scheme chose it."""
        configured = self.setting("optimizer.lr")
        if configured is not None:
            return float(configured)
        logged = self.train.lr[np.isfinite(self.train.lr)]
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
        """The last validation pass (not the best one). Raises `UserError` when there is none yet."""
        e = self.evals
        if not e.step.size:
            raise UserError(
                "run",
                str(self.path),
                "has no evaluation yet: let it train until its first eval line, then try again",
            )
        return Evaluation(int(e.step[-1]), int(e.tokens[-1]), float(e.loss[-1]), float(e.bits_per_byte[-1]))

    @property
    def step_seconds(self) -> float | None:
        """Median seconds per training step, the first `COMPILE_LINES` lines left out; None if unmeasured."""
        seconds = self.train.step_seconds
        seconds = seconds[min(COMPILE_LINES, max(seconds.size - 1, 0)) :]
        seconds = seconds[np.isfinite(seconds)]
        return float(np.median(seconds)) if seconds.size else None

    @property
    def depth_facts(self) -> DepthFacts | None:
        """Facts of the last depth line; None when the run logged none."""
        log = self.depth_log
        if not log.step.size:
            return None
        log_norm, turn, ratio = log.log_norm[-1], log.turn[-1], log.ratio[-1]
        return DepthFacts(
            growth=float(np.exp(log_norm[-1] - log_norm[2])),
            late_turn_degrees=float(np.degrees(np.mean(turn[-last_quarter(turn.size) :]))),
            dead_gates=int(np.sum(~(ratio >= DEAD_RATIO))),
        )


def last_quarter(sublayers: int) -> int:
    """How many sublayers make the last quarter of the depth: at least one."""
    return math.ceil(sublayers / 4)


def load_run(path: str | Path) -> Run:
    """Read the run folder `path`.

    After a resume a step may have been logged twice: the later line wins. A half-written last line (the run
    was killed) and lines of an unknown kind are passed over. Raises `UserError` when `path` is not a run
    folder, or naming file and line when anything else in it cannot be read.
    """
    path = Path(path)
    if not path.is_dir() or not (path / "config.json").is_file():
        raise UserError("run", str(path), "is not a run folder: give the folder that holds its config.json")
    config = _json_object(path / "config.json")
    info = _json_object(path / "info.json")
    for key in ("parameters", "train_flops_per_token"):
        if not _is_number(info.get(key)):
            raise UserError(key, info.get(key), f"{path / 'info.json'} must give a number here")
    logs, events = _read_metrics(path / "metrics.jsonl")
    sample = path / "sample.txt"
    run = Run(
        path=path,
        config=config,
        info=info,
        train=_log(TrainLog, logs["train"]),
        evals=_log(EvalLog, logs["eval"]),
        depth_log=_log(DepthLog, logs["depth"]),
        events=tuple(events),
        sample=sample.read_text(encoding="utf-8", errors="replace") if sample.is_file() else None,
    )
    for field in ("scheme.name", "model.depth", "optimizer.lr"):
        run.setting(field)
    sublayers = run.depth_log.turn.shape[1] if run.depth_log.step.size else 2 * run.depth
    if sublayers != 2 * run.depth:
        raise UserError(
            "model.depth",
            run.depth,
            f"{path / 'metrics.jsonl'} has {sublayers} sublayers per depth line, not twice that",
        )
    return run


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("run", str(file.parent), f"has no {file.name}: was it ever started?") from None
    except ValueError as error:
        raise UserError(str(file), "", f"is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(str(file), value, "must hold one JSON object")
    return value


_LOGS = {"train": TrainLog, "eval": EvalLog, "depth": DepthLog}


def _read_metrics(file: Path) -> tuple[dict[str, dict[int, dict]], list[Event]]:
    """Lines by kind and step, the later of two with the same step; and the events in file order."""
    logs: dict[str, dict[int, dict]] = {kind: {} for kind in _LOGS}
    events: list[Event] = []
    raw = file.read_bytes() if file.is_file() else b""
    *whole, unfinished = raw.split(b"\n")
    lines = [*whole, unfinished] if _parses(unfinished) else whole
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            complaint = _complaint(line)
        except ValueError:
            complaint = "is not valid JSON"
        if complaint:
            shown = text[:60].decode("utf-8", "replace")
            raise UserError(f"{file}:{number}", shown, f"{complaint}: repair or remove this line")
        if line["kind"] == "event":
            events.append(Event(int(line["step"]), str(line["message"])))
        elif line["kind"] in logs:
            logs[line["kind"]][int(line["step"])] = line
    widths = {len(line["turn"]) for line in logs["depth"].values()}
    if len(widths) > 1:
        raise UserError(str(file), sorted(widths), "depth lines of one run must have the same number of sublayers")
    return logs, events


def _parses(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _complaint(line: Any) -> str | None:
    """What is wrong with one parsed line, or None."""
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return "must be an object with a 'kind'"
    kind = line["kind"]
    if kind == "event":
        fine = isinstance(line.get("step"), int) and isinstance(line.get("message"), str)
        return None if fine else "must have an integer 'step' and a 'message'"
    if kind not in _LOGS:
        return None
    for field in fields(_LOGS[kind]):
        value = line.get(field.name)
        if field.name not in line and field.name not in _OPTIONAL:
            return f"has no '{field.name}'"
        if field.name in ("step", "tokens"):
            fine = isinstance(value, int)
        elif kind == "depth":
            fine = isinstance(value, list) and all(v is None or _is_number(v) for v in value)
        else:
            fine = value is None or _is_number(value)
        if not fine:
            return f"has a '{field.name}' of the wrong type"
    if kind == "depth":
        sublayers = len(line["log_norm"]) - 1
        if sublayers < 2 or any(len(line[key]) != sublayers for key in ("turn", "ratio", "gate", "closed")):
            return "must have S numbers per sublayer list, S >= 2, and S + 1 in 'log_norm'"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _log(cls, lines: dict[int, dict]):
    """Stack lines into arrays in step order; null becomes NaN."""
    ordered = [lines[step] for step in sorted(lines)]
    columns = {}
    for name in (field.name for field in fields(cls)):
        dtype = np.int64 if name in ("step", "tokens") else np.float64
        columns[name] = np.array([line.get(name) for line in ordered], dtype=dtype)
    return cls(**columns)
