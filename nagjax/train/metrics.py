"""Where a run's numbers go: JSON lines always, TensorBoard and Weights & Biases when asked for."""

import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import jax

from nagjax.errors import UserError


class Writer(Protocol):
    def write(self, record: dict) -> None:
        """One record: `kind`, `step` and values."""

    def close(self) -> None: ...


class JsonLines:
    """Appends a line per record. Lines of steps after `resume_step` (from a run that died later than its last
    checkpoint) and a half-written last line are dropped first."""

    def __init__(self, path: Path, resume_step: int):
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if record["step"] <= resume_step and resume_step > 0:
                    kept.append(line)
        scratch = path.with_suffix(".tmp")
        scratch.write_text("".join(f"{line}\n" for line in kept))
        os.replace(scratch, path)
        self._file = path.open("a", buffering=1)

    def write(self, record: dict) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


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

    def __init__(self, folder: Path, log: Sequence[str], config: dict, resume_step: int):
        self._writers: list[Writer] = []
        if jax.process_index():
            return  # one host writes
        if "tensorboard" in log:
            self._writers.append(TensorBoard(folder))
        if "wandb" in log:
            self._writers.append(Wandb(folder, config))
        self._writers.append(JsonLines(folder / "metrics.jsonl", resume_step))

    def write(self, kind: str, step: int, **values) -> None:
        for writer in self._writers:
            writer.write({"kind": kind, "step": step} | values)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
