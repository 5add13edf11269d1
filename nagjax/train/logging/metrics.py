"""Writers of a run's metrics: always JSON lines, on request also TensorBoard and Weights & Biases."""

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
    """Raises UserError if a requested writer is not installed on the first host, which does the writing."""
    for name in log if jax.process_index() == 0 else ():
        _imported(name)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(MODULES[name])
    except ImportError:
        raise UserError("log", name, f"is not installed: pip install -e '.[{name}]'") from None


class TensorBoard:
    """Writes TensorBoard event files. A run that continues from a step begins a file that says so, and TensorBoard then
    hides what older files have after that step."""

    def __init__(self, folder: Path, step: int):
        self._folder, self._files = folder / TENSORBOARD, 0
        self._open(step)

    def _open(self, step: int) -> None:
        # The names contain the second in which a file is begun: without a suffix, a rewind within it would overwrite a
        # file.
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
    """Writes to Weights & Biases. The training step is logged as a value, and set as the x axis of the charts. W&B's
    own step cannot serve: it must not decrease, so W&B would drop what a rewound or resumed run logs until it passes
    the old step. Records from before a rewind stay in W&B."""

    def __init__(self, folder: Path, config: dict):
        wandb = _imported("wandb")
        name = folder / WANDB_ID  # holds the W&B run's id, so that a resume continues the same run
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
    """All of a run's writers as one. `check` is called before every record is written, and raises if none may be
    written; `callback` is called with every record after it was written."""

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
        self._writers: list[Any] = []  # each with `write(record)` (`kind`, `step`, values), `rewind` and `close`
        self._check = check
        self._callback = callback  # called on all hosts, so that it may compute with arrays that are spread over them
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
        """Goes back to `step`: later records are removed from the JSON lines, except events, and hidden in
        TensorBoard."""
        for writer in self._writers:
            writer.rewind(step, owed)

    def sync(self) -> None:
        """Syncs the JSON lines to disk."""
        if self._lines:
            self._lines.sync()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
