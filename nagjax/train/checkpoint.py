"""Checkpoints of the whole state together with the data iterator."""

import contextlib
import shutil
from pathlib import Path

import jax
from orbax.checkpoint import v1 as ocp

from nagjax.errors import UserError
from nagjax.train.state import TrainState

STATE, DATA = "state", "data"


class Checkpoints:
    """Orbax checkpoints in a folder: written in the background, complete or not there, the newest `keep` kept."""

    def __init__(self, folder: Path, keep: int = 2):
        policies = ocp.training.preservation_policies
        self.folder = Path(folder).absolute()
        self._orbax = ocp.training.Checkpointer(
            self.folder, preservation_policy=policies.LatestN(keep), cleanup_tmp_directories=True
        )

    @property
    def latest(self) -> int | None:
        """Steps done at the newest complete checkpoint, or None."""
        newest = self._orbax.latest
        return None if newest is None else newest.step

    def save(self, step: int, state: TrainState, data) -> None:
        """Starts saving; the arrays may be donated away as soon as this returns. Waits for the previous save."""
        if step != self.latest:
            with self._saving():
                self._orbax.save_checkpointables_async(step, {STATE: state._asdict(), DATA: data}, force=True)

    def restore(self, abstract: TrainState, data) -> TrainState:
        """The newest state, each shard where `abstract` puts it; `data` is moved to its saved position."""
        try:
            loaded = self._orbax.load_checkpointables(self.latest, {STATE: abstract._asdict(), DATA: data})
        except Exception as error:  # orbax, tensorstore and grain each raise types of their own
            raise _unreadable(self.folder / str(self.latest), error) from error
        return TrainState(**loaded[STATE])

    def close(self) -> None:
        """Waits until everything is on disk."""
        with self._saving():
            self._orbax.close()

    @contextlib.contextmanager
    def _saving(self):
        """A save that failed, now or in the background, becomes one line; complete checkpoints are untouched."""
        try:
            yield
        except Exception as error:  # tensorstore, orbax and the file system each raise types of their own
            fix = f"could not be written ({_reason(error)}): free some space or move the run; complete ones are kept"
            raise UserError("checkpoint", str(self.folder), fix) from error

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        with contextlib.suppress(UserError) if kind else contextlib.nullcontext():
            self.close()


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _unreadable(path: Path, error: Exception) -> UserError:
    fix = f"cannot be read ({_reason(error)}): it is damaged, or of another model; remove it to go on from an older one"
    return UserError("checkpoint", str(path), fix)


def restore_params(folder: Path, abstract: TrainState) -> TrainState:
    """Step and parameters of the newest state in a folder of checkpoints; the optimizer's moments stay on disk.

    Only reads: a run that is saving into the folder at the same time is not disturbed.
    Raises UserError where there is no checkpoint, or it cannot be read.
    """
    folder = Path(folder).absolute()
    partial = ocp.Context()
    partial.pytree.loading.partial_load = True
    missing = UserError("run", str(folder.parent), "has no checkpoint yet: train it first (nagjax train)")
    if not folder.is_dir():
        raise missing
    with ocp.training.Checkpointer(folder, context=partial) as reader:
        if reader.latest is None:
            raise missing
        wanted = {name: leaf for name, leaf in abstract._asdict().items() if name != "optimizer"}
        try:
            loaded = reader.load_checkpointables(reader.latest.step, {STATE: wanted})
        except Exception as error:
            raise _unreadable(folder / str(reader.latest.step), error) from error
    return TrainState(**loaded[STATE], optimizer=None)


def steps_saved(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, in order; reads names only."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit()) if folder.is_dir() else []


def clear(folder: Path) -> None:
    """Removes a run's checkpoints and metrics, and nothing else that may lie in its folder."""
    if jax.process_index() == 0:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        for name in ("config.json", "corpus.json", "info.json", "metrics.jsonl", "sample.txt", "tokenizer.json"):
            (folder / name).unlink(missing_ok=True)
