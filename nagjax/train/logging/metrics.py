"""Writers of a run's metrics: JSON lines always, TensorBoard and Weights & Biases if asked for."""

import importlib
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from nagjax.errors import UserError
from nagjax.files import has_file, read_bytes, write_text
from nagjax.runs.metrics import JsonLines
from nagjax.runs.names import METRICS, TENSORBOARD, WANDB_ID


def _scalars(record: dict) -> dict[str, float]:
    kind = record["kind"]
    return {f"{kind}/{k}": v for k, v in record.items() if k != "step" and isinstance(v, int | float)}


MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_log(log: Sequence[str]) -> None:
    """Raises UserError on the first host, which writes, for what is not installed there."""
    for name in log if jax.process_index() == 0 else ():
        _imported(name)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(MODULES[name])
    except ImportError:
        raise UserError("log", name, f"is not installed: pip install -e '.[{name}]'") from None


class TensorBoard:
    """A run that goes on from a step begins a file that says so: TensorBoard hides what older ones have after it."""

    def __init__(self, folder: Path, step: int):
        self._folder, self._files = folder / TENSORBOARD, 0
        self._open(step)

    def _open(self, step: int) -> None:
        # Files are named by the second in which they begin, so a rewind soon after would write over its own.
        after, suffix = step + 1 if step else 0, f".{self._files}"
        make = _imported("tensorboard").SummaryWriter
        self._writer = make(str(self._folder), purge_step=after, filename_suffix=suffix)
        self._files += 1

    def rewind(self, step: int, owed: bool) -> None:
        self._writer.close()
        self._open(step)

    def write(self, record: dict) -> None:
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """The training's step is a value of every record and the axis of its charts. W&B's own step must not fall, and it
    would drop whatever a rewound or resumed run logs until it is further than before. What it has, it keeps."""

    def __init__(self, folder: Path, config: dict):
        wandb = _imported("wandb")
        name = folder / WANDB_ID  # the same run goes on after a resume
        if not has_file(name):
            write_text(name, uuid.uuid4().hex)
        options = {"name": folder.name, "dir": str(folder), "config": config}
        known = read_bytes(name, largest=1000).decode(errors="replace").strip()
        self._run = wandb.init(project="nagjax", id=known, resume="allow", **options)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def rewind(self, step: int, owed: bool) -> None:
        pass

    def write(self, record: dict) -> None:
        if scalars := _scalars(record):
            self._run.log(scalars | {"step": record["step"]})

    def close(self) -> None:
        self._run.finish()


class Writers:
    """All of a run's writers as one. `check` is called before every record is written, and raises where none may be;
    `callback` is called with every record after it was."""

    def __init__(
        self,
        folder: Path,
        log: Sequence[str],
        config: dict,
        resume_step: int,
        owed: bool = False,
        callback: Callable[[dict], None] | None = None,
        check: Callable[[], None] | None = None,
    ):
        self._writers: list[Any] = []  # with `write`, which takes a record (`kind`, `step`, values), `rewind`, `close`
        self._check = check
        self._callback = callback  # on all hosts, so that it may compute with what is spread over them
        self._lines: JsonLines | None = None
        if jax.process_index() == 0:  # only the first host writes
            if "tensorboard" in log:
                self._writers.append(TensorBoard(folder, resume_step))
            if "wandb" in log:
                self._writers.append(Wandb(folder, config))
            self._lines = JsonLines(folder / METRICS, resume_step, owed)
            self._writers.append(self._lines)

    def write(self, kind: str, step: int, **values) -> None:
        record = {"kind": kind, "step": step} | values
        if self._check is not None:
            self._check()
        for writer in self._writers:
            writer.write(record)
        if self._callback is not None:
            self._callback(record)

    def rewind(self, step: int, owed: bool) -> None:
        """Goes back to `step`: later records leave the JSON lines, except events, and are hidden in TensorBoard."""
        for writer in self._writers:
            writer.rewind(step, owed)

    def sync(self) -> None:
        """Makes sure that the JSON lines are on disk."""
        if self._lines:
            self._lines.sync()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
