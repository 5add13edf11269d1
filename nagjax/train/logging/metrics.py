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
    def __init__(self, folder: Path):
        self._writer = _imported("tensorboard").SummaryWriter(str(folder / TENSORBOARD))

    def write(self, record: dict) -> None:
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    def __init__(self, folder: Path, config: dict):
        wandb = _imported("wandb")
        name = folder / WANDB_ID  # the same run goes on after a resume
        if not has_file(name):
            write_text(name, uuid.uuid4().hex)
        options = {"name": folder.name, "dir": str(folder), "config": config}
        known = read_bytes(name, largest=1000).decode(errors="replace").strip()
        self._run = wandb.init(project="nagjax", id=known, resume="allow", **options)

    def write(self, record: dict) -> None:
        self._run.log(_scalars(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


class Writers:
    """All of a run's writers as one. `callback` is called with every record after it was written."""

    def __init__(
        self,
        folder: Path,
        log: Sequence[str],
        config: dict,
        resume_step: int,
        owed: bool = False,
        callback: Callable[[dict], None] | None = None,
    ):
        self._writers: list[Any] = []  # with `write`, which takes a record (`kind`, `step` and values), and `close`
        self._callback = callback  # on all hosts, so that it may compute with what is spread over them
        self._lines: JsonLines | None = None
        if jax.process_index() == 0:  # only the first host writes
            if "tensorboard" in log:
                self._writers.append(TensorBoard(folder))
            if "wandb" in log:
                self._writers.append(Wandb(folder, config))
            self._lines = JsonLines(folder / METRICS, resume_step, owed)
            self._writers.append(self._lines)

    def write(self, kind: str, step: int, **values) -> None:
        record = {"kind": kind, "step": step} | values
        for writer in self._writers:
            writer.write(record)
        if self._callback is not None:
            self._callback(record)

    def rewind(self, step: int, owed: bool) -> None:
        """Goes back to `step`: removes later records from the JSON lines, except events."""
        if self._lines:
            self._lines.rewind(step, owed)

    def sync(self) -> None:
        """Makes sure that the JSON lines are on disk."""
        if self._lines:
            self._lines.sync()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
