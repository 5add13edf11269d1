"""`metrics.jsonl`: the lines that a run appends while it trains, and how they are read."""

import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from nagjax.errors import UserError
from nagjax.files import inside, json_text, naming, open_to_change
from nagjax.json_reader import LONGEST_LINE, damaged_line, parse_json, read_lines

_OPTIONAL = {"mfu", "accuracy", "targets", "top_k_loss"}


@dataclass(frozen=True, eq=False)
class TrainLog:
    """Training lines in step order, one entry per logged step. Values that were not measured are NaN."""

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
    """Validation lines in step order. Values that were not measured are NaN. Runs with Mixture-of-Depths are judged by
    their causal decider (`judged`). Runs of earlier versions, which did not measure it, are judged by top-k, and their
    `top_k_loss` is NaN."""

    step: Int[np.ndarray, "N"]
    tokens: Int[np.ndarray, "N"]
    loss: Float[np.ndarray, "N"]
    """Nats per token."""
    bits_per_byte: Float[np.ndarray, "N"]
    accuracy: Float[np.ndarray, "N"]
    targets: Float[np.ndarray, "N"]
    """Counted targets; NaN in lines of earlier versions, which did not write them."""
    top_k_loss: Float[np.ndarray, "N"]
    """Nats per token if tokens are chosen by top-k, as in training; that choice depends on later tokens. NaN without
    routing."""


@dataclass(frozen=True, eq=False)
class DepthLog:
    """Per-sublayer telemetry in step order; sublayers 2i and 2i+1 are attention and MLP of block i."""

    step: Int[np.ndarray, "N"]
    log_norm: Float[np.ndarray, "N S+1"]
    """Log of the residual stream's RMS before each sublayer, and after the last."""
    turn: Float[np.ndarray, "N S"]
    """Mean angle by which the sublayer turns the stream, in radians."""
    ratio: Float[np.ndarray, "N S"]
    """Mean ratio of the length of the stream's change to its length before the sublayer."""
    gate: Float[np.ndarray, "N S"]
    """Mean gate; 1 where the scheme has none."""
    closed: Float[np.ndarray, "N S"]
    """Share of tokens whose gate is below 0.05; 0 where the scheme has none."""

    @property
    def growth(self) -> Float[np.ndarray, "N"]:
        """RMS of the residual stream after the last block, divided by that after the first."""
        if not self.step.size:
            return np.empty(0)
        return np.exp(self.log_norm[:, -1] - self.log_norm[:, 2])


@dataclass(frozen=True)
class Event:
    """Something that happened to the run: a resume, a skipped step."""

    step: int
    message: str


TIMED = ("tokens_per_second", "step_seconds", "mfu")


def comparable(path: Path) -> list[dict]:
    """The records of a metrics.jsonl that a run repeats bit for bit however often it is killed: all except events,
    which happened to this run only, and without the wall-clock fields `TIMED`."""
    records = filter(None, map(_parsed, path.read_bytes().splitlines()))  # drops a half-written last line
    return [{k: v for k, v in r.items() if k not in TIMED} for r in records if r["kind"] != "event"]


def judged(line: dict) -> dict:
    """A validation line in which the scores that judge the run have the plain names: those of the causal decider if
    there are any, and then the scores under top-k get the prefix `top_k_`."""
    causal = {name: value for name, value in line.items() if name.startswith("causal_")}
    names = [name.removeprefix("causal_") for name in causal]
    rest = {name: value for name, value in line.items() if name not in causal}
    return rest | {f"top_k_{name}": line.get(name) for name in names} | dict(zip(names, causal.values(), strict=True))


class JsonLines:
    """Appends one line per record; a number that is not finite becomes null.

    A run that continues from step n first rewinds the file to n: lines of later steps and a half-written last line are
    dropped, and the evaluation's lines at n, too, if it is still `owed`. Events stay, because they happened. A run that
    starts (n = 0) begins an empty file.

    The file is truncated in place and never replaced, so that whoever has it open (a reader that follows it, or a
    process that should not write it) sees the same file as everybody else. A crash during the truncation can lose
    events only.
    """

    def __init__(self, path: Path, resume_step: int, owed: bool = False):
        self.path = path
        self._file = open_to_change(path)
        self._cut(lambda record: resume_step > 0 and _stays(record, resume_step, owed))

    def _cut(self, stays: Callable[[dict], bool]) -> None:
        self._file.seek(0)
        same, tail, unchanged = 0, [], True
        while line := self._file.readline(LONGEST_LINE + 1):
            record, ended = _parsed(line), line.endswith(b"\n")
            unchanged &= record is not None and ended and stays(record)
            if unchanged:
                same += len(line)
            elif record is not None and stays(record):
                tail.append(line if ended else line + b"\n")
        with naming(self.path):
            self._file.truncate(same)
            self._file.seek(same)
            self._file.writelines(tail)
            self.sync()

    def rewind(self, step: int, owed: bool) -> None:
        self._cut(lambda record: _stays(record, step, owed))

    def write(self, record: dict) -> None:
        with naming(self.path):
            self._file.seek(0, os.SEEK_END)
            self._file.write((json_text(record) + "\n").encode())
            self._file.flush()

    def sync(self) -> None:
        with naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with naming(self.path):
            self._file.close()


def _stays(record: dict, step: int, owed: bool) -> bool:
    if record["kind"] == "event":
        return True
    return record["step"] < step or (record["step"] == step and (record["kind"] == "train" or not owed))


_LOGS = {"train": TrainLog, "eval": EvalLog, "depth": DepthLog}
TASKS = "tasks"  # the kind of a line with scores of tasks by name; the names differ between runs


def read_metrics(file: Path) -> tuple[dict[str, dict[int, dict]], list[Event]]:
    """Lines by kind and step, of two with the same step the later one; and the events in the order of the file."""
    logs: dict[str, dict[int, dict]] = {kind: {} for kind in (*_LOGS, TASKS)}
    events: list[Event] = []
    found = inside(file)
    with found.open("rb") if found.is_file() else io.BytesIO() as lines:
        for number, line in read_lines(lines, str(file)):
            line = judged(line) if isinstance(line, dict) and line.get("kind") == "eval" else line
            if complaint := _complaint(line):
                raise damaged_line(str(file), number, json.dumps(line).encode(), complaint)
            if line["kind"] == "event":
                events.append(Event(line["step"], line["message"]))
            elif line["kind"] in logs:
                logs[line["kind"]][line["step"]] = line
    widths = {len(line["turn"]) for line in logs["depth"].values()}
    if len(widths) > 1:
        raise UserError(str(file), sorted(widths), "depth lines of one run must have the same number of sublayers")
    return logs, events


def _parsed(line: bytes) -> dict | None:
    """A line with a kind and a step; None for anything else, such as half a line or what a crash of the machine
    left."""
    try:
        record = parse_json(line, lenient=True)
    except ValueError:
        return None
    fine = isinstance(record, dict) and isinstance(record.get("kind"), str) and _is_count(record.get("step"))
    return record if fine else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _complaint(line: Any) -> str | None:
    """What is wrong with one parsed line, or None."""
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return "must be an object with a 'kind'"
    kind = line["kind"]
    if kind == "event":
        fine = _is_count(line.get("step")) and isinstance(line.get("message"), str)
        return None if fine else "must have an integer 'step' and a 'message'"
    if kind == TASKS:
        counts = all(_is_count(line.get(name)) for name in ("step", "tokens"))
        fine = counts and all(value is None or is_number(value) for name, value in line.items() if name != "kind")
        return None if fine else "must have a 'step', 'tokens' and scores that are numbers"
    if kind not in _LOGS:
        return None
    for field in fields(_LOGS[kind]):
        value = line.get(field.name)
        if field.name not in line and field.name not in _OPTIONAL:
            return f"has no '{field.name}'"
        if field.name in ("step", "tokens"):
            fine = _is_count(value)
        elif kind == "depth":
            fine = isinstance(value, list) and all(v is None or is_number(v) for v in value)
        else:
            fine = value is None or is_number(value)
        if not fine:
            return f"has a '{field.name}' of the wrong type"
    if kind == "depth":
        sublayers = len(line["log_norm"]) - 1
        if sublayers < 2 or any(len(line[key]) != sublayers for key in ("turn", "ratio", "gate", "closed")):
            return "must have S numbers per sublayer list, S >= 2, and S + 1 in 'log_norm'"
    return None


def is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63)


def columns(cls, lines: dict[int, dict]):
    """Stacks lines into arrays [N] or [N, ...] in step order, int64 for counts and else float64; null becomes NaN."""
    ordered = [lines[step] for step in sorted(lines)]
    values = {}
    for name in (field.name for field in fields(cls)):
        dtype = np.int64 if name in ("step", "tokens") else np.float64
        values[name] = np.array([line.get(name) for line in ordered], dtype=dtype)
    return cls(**values)
