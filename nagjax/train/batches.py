"""The training batch of every step, and the record of batches that are left out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nagjax.console import note
from nagjax.data import Dataset, batches
from nagjax.errors import UserError
from nagjax.files import read_record, write_json
from nagjax.ranges import Natural
from nagjax.runs.names import SKIPPED
from nagjax.train.distributed.consensus import from_first

ENDED = "terminated unexpectedly"  # in grain's error message for a worker process that has died


@dataclass(frozen=True)
class _Batches:
    batches: list[Natural]


class Skipped:
    """The numbers of the batches that a run leaves out after rolling back, kept in `skipped.json` in the run's folder.

    The file is on disk before the run continues, so a skipped batch stays skipped, however often the run is killed. A
    run that is killed before its first checkpoint begins anew and judges all of its batches again.
    """

    def __init__(self, folder: Path, *, fresh: bool, fix: str = "choose another --out (--fresh deletes the run)"):
        self.path, self._fix = folder / SKIPPED, fix
        self.batches: list[int] = from_first(self._clear if fresh else self._read)

    def _clear(self) -> list[int]:
        self.path.unlink(missing_ok=True)
        return []

    def _read(self) -> list[int]:
        found = read_record(_Batches, self.path, "out", f"bring it back, or {self._fix}")
        return sorted({*found.batches}) if found else []

    def add(self, batch: int) -> None:
        self.batches = sorted({*self.batches, batch})
        from_first(lambda: write_json(self.path, {"batches": self.batches}))

    def batch_of(self, step: int) -> int:
        """The number of the batch (from 0) that a step (from 1) takes."""
        batch = step - 1
        for left_out in self.batches:
            batch += left_out <= batch
        return batch

    def after(self, step: int) -> int:
        """How many of the left-out batches come after the batch of this step (0: before the first step)."""
        taken = self.batch_of(step) if step else -1
        return sum(batch > taken for batch in self.batches)


class TrainBatches:
    """The training batches in the order of steps. Which rows a batch holds depends only on its number, not on the
    number of processes or workers. `steps` is the length of the whole training, over which a mixture's weights
    change."""

    def __init__(self, dataset: Dataset, batch: int, context: int, steps: int | None = None, **share: Any):
        share = share | {"batch": batch, "context": context, "steps": steps}
        self._open = lambda start: batches(dataset, start=start, **share)
        self._workers = dataset.config.workers
        self._rows: Any = self._open(0)
        self._next = 0

    def take(self, number: int) -> dict:
        """This process's part of batch `number` (from 0), a dict of arrays. Fast if it is one of the next 16 batches
        after the last one taken; otherwise the pipeline is opened again.

        A worker process that dies is replaced once. Raises UserError if its successor dies before it has made the
        batch.
        """
        if not self._next <= number < self._next + 16:
            self._open_at(number)
        replaced = False
        while True:
            try:
                return self._up_to(number)
            except RuntimeError as error:
                if not (self._workers and ENDED in str(error)):
                    raise
                if replaced:
                    fix = "exit code -9 is often a lack of memory, use fewer"
                    told = f"one ended twice before batch {number} ({error}): {fix}"
                    raise UserError("data.workers", self._workers, told) from error
                note(f"nagjax: {error} The workers are started again, from batch {number}.")
            self._open_at(number)
            replaced = True

    def _open_at(self, number: int) -> None:
        self.close()
        self._rows, self._next = self._open(number), number

    def _up_to(self, number: int) -> dict:
        while self._next < number:
            next(self._rows)
            self._next += 1
        self._next += 1
        return next(self._rows)

    def close(self) -> None:
        """Ends the workers, if any. After this no batch can be taken."""
        if hasattr(self._rows, "close"):
            self._rows.close()
        self._rows = None  # drops the iterator now rather than while the interpreter shuts down
