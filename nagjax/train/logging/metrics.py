"""Where a run's numbers go: JSON lines always, TensorBoard and Weights & Biases when asked for."""

import json
import math
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import jax

from nagjax.errors import UserError
from nagjax.train.checkpoint.manifest import write_durably


class Writer(Protocol):
    def write(self, record: dict) -> None:
        """One record: `kind`, `step` and values."""

    def close(self) -> None: ...


TIMED = ("tokens_per_second", "step_seconds", "mfu")


def comparable(path: Path) -> list[dict]:
    """The records of a metrics.jsonl that a run repeats bit for bit however often it is killed: all but events (what
    happened to this one) and the wall-clock fields `TIMED`."""
    records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [{k: v for k, v in r.items() if k not in TIMED} for r in records if r["kind"] != "event"]


class JsonLines:
    """Appends a line per record; a number that is not finite becomes null.

    A run that goes on from step n rewinds the file to n first: lines of later steps and a half-written last line are
    dropped, and if the evaluation at n is still `owed`, lines of it; events stay, because they happened. A run that
    starts (n = 0) begins an empty file.
    """

    def __init__(self, path: Path, resume_step: int, owed: bool = False):
        self.path = path
        self._cut(lambda record: resume_step > 0 and _stays(record, resume_step, owed))

    def _cut(self, stays: Callable[[dict], bool]) -> None:
        kept = []
        if self.path.exists():
            for line in self.path.read_bytes().split(b"\n"):
                try:
                    if stays(json.loads(line)):
                        kept.append(line.decode() + "\n")
                except ValueError:  # half a line, or what a crash of the machine left of it
                    continue
        write_durably(self.path, "".join(kept))
        self._file = self.path.open("a", buffering=1, encoding="utf-8")

    def rewind(self, step: int, owed: bool) -> None:
        self._file.close()
        self._cut(lambda record: _stays(record, step, owed))

    def write(self, record: dict) -> None:
        try:
            self._file.write(json.dumps({name: _json(value) for name, value in record.items()}) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _stays(record: dict, step: int, owed: bool) -> bool:
    if record["kind"] == "event":
        return True
    return record["step"] < step or (record["step"] == step and (record["kind"] == "train" or not owed))


def _json(value):
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [_json(v) for v in value] if isinstance(value, list) else value


def _scalars(record: dict) -> dict[str, float]:
    kind = record["kind"]
    return {f"{kind}/{k}": v for k, v in record.items() if k != "step" and isinstance(v, int | float)}


class TensorBoard:
    def __init__(self, folder: Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise UserError("log", "tensorboard", "pip install 'nagjax[tensorboard]'") from None
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, record: dict) -> None:
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    def __init__(self, folder: Path, config: dict):
        try:
            import wandb
        except ImportError:
            raise UserError("log", "wandb", "pip install 'nagjax[wandb]'") from None
        name = folder / "wandb_id"  # the same run goes on after a resume
        if not name.exists():
            name.write_text(uuid.uuid4().hex)
        options = {"name": folder.name, "dir": str(folder), "config": config}
        self._run = wandb.init(project="nagjax", id=name.read_text(), resume="allow", **options)

    def write(self, record: dict) -> None:
        self._run.log(_scalars(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


class Writers:
    """All of a run's writers as one."""

    def __init__(self, folder: Path, log: Sequence[str], config: dict, resume_step: int, owed: bool = False):
        self._writers: list[Writer] = []
        self._lines: JsonLines | None = None
        if jax.process_index():
            return  # one host writes
        if "tensorboard" in log:
            self._writers.append(TensorBoard(folder))
        if "wandb" in log:
            self._writers.append(Wandb(folder, config))
        self._lines = JsonLines(folder / "metrics.jsonl", resume_step, owed)
        self._writers.append(self._lines)

    def write(self, kind: str, step: int, **values) -> None:
        for writer in self._writers:
            writer.write({"kind": kind, "step": step} | values)

    def rewind(self, step: int, owed: bool) -> None:
        """The run goes back to `step`: JSON lines forget what came after it, but not the events."""
        if self._lines:
            self._lines.rewind(step, owed)

    def sync(self) -> None:
        """Puts the JSON lines on disk."""
        if self._lines:
            self._lines.sync()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
