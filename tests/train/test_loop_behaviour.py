"""How a run handles unusual settings, and that the host does not wait inside the loop."""

import json
import signal
import types

import jax
import pytest
from jax._src.array import ArrayImpl

from nagjax.errors import UserError
from nagjax.runs.config import MeshConfig
from nagjax.runs.lock import WriterLock
from nagjax.train import loop
from nagjax.train.checkpoint.retention import SaveClock
from nagjax.train.checkpoint.store import Checkpoints, steps_saved
from nagjax.train.logging import steplog
from nagjax.train.loop import train


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def latest(folder):
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return checkpoints.latest


def train_losses(folder):
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [(r["step"], r["loss"]) for r in lines if r["kind"] == "train"]


@pytest.fixture(scope="module")
def finished(run_of, tmp_path_factory):
    return train(run_of(), tmp_path_factory.mktemp("runs") / "finished")


def test_another_config_is_refused_and_nothing_is_touched(run_of, finished):
    before = contents(finished)
    with pytest.raises(UserError, match="optimizer.lr was not given and is now 0.5") as caught:
        train(run_of(lr=0.5), finished)
    assert caught.value.field == "out" and "--fresh" in str(caught.value)
    with pytest.raises(UserError, match="scheme.name was 'nag' and is now 'plain'.*train.steps was 6 and is now 7"):
        train(run_of("plain", steps=7), finished)
    assert contents(finished) == before
    train(run_of(eval_every=1, mesh=MeshConfig(data=2)), finished)  # these change no result
    assert contents(finished) == before  # nor what a finished run says of itself


def test_fresh_starts_over_and_spares_foreign_files(run_of, finished):
    losses = train_losses(finished)
    (finished / "notes.txt").write_text("mine")
    train(run_of(lr=0.01), finished, fresh=True)
    again = train_losses(finished)
    assert [s for s, _ in again] == [1, 2, 3, 4, 5, 6] and again[0] == losses[0] and again[2:] != losses[2:]
    assert (finished / "notes.txt").read_text() == "mine"
    assert json.loads((finished / "config.json").read_text())["optimizer"]["lr"] == 0.01


@pytest.mark.parametrize(
    "asked, words",
    [
        (dict(batch=6, mesh=MeshConfig(data=4)), "data x fsdp = 4; try 4"),
        (dict(batch=12, accumulate=2, mesh=MeshConfig(data=2, fsdp=2)), "data x fsdp = 4; try 8"),
    ],
)
def test_a_batch_the_mesh_cannot_share(run_of, tmp_path, asked, words):
    with pytest.raises(UserError, match=words) as caught:
        train(run_of(**asked), tmp_path / "run")
    assert caught.value.field == "batch" and not (tmp_path / "run").exists()


def test_the_host_reads_one_step_late_and_one_program_is_enough(run_of, finished, tmp_path, monkeypatch):
    """Order of dispatches and reads, transfers forbidden but for the explicit ones, and one compilation.

    The guard against transfers to the host does nothing on CPU, where there are none; so whatever makes a number of
    an array (float, int, bool, item) between the first step and the fifth is recorded too. The run is interrupted
    after its fifth step and must then have saved it.
    """
    events, steps, allowed, value = [], [], [], ArrayImpl._value
    real_step, real_get = loop.jit_train_step, steplog.jax.device_get

    def watched(blueprint):
        step = real_step(blueprint)
        steps.append(step)

        def take(state, batch):
            events.append("step")
            if events.count("step") == 1:
                monkeypatch.setattr(ArrayImpl, "_value", property(recorded))
            if events.count("step") == 5:
                monkeypatch.setattr(ArrayImpl, "_value", value)
                signal.raise_signal(signal.SIGINT)
            with jax.transfer_guard("disallow"):
                return step(state, batch)

        return take

    class Watched:
        def __getattr__(self, name):
            return getattr(jax, name)

        def device_get(self, tree):
            events.append(f"read {len(tree)}")
            allowed.append(True)
            try:
                return real_get(tree)
            finally:
                allowed.pop()

    def recorded(array):
        if not allowed:
            events.append("transfer")
        return value.__get__(array)

    monkeypatch.setattr(loop, "jit_train_step", watched)
    monkeypatch.setattr(steplog, "jax", Watched())
    handlers = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), jax.transfer_guard_device_to_host("disallow"):
        train(run_of(eval_every=100, save_every=100), tmp_path / "run")
    assert events == ["step", "step", "read 1", "step", "read 1", "step", "read 1", "step", "read 1", "read 1"]
    assert steps[0]._cache_size() == 1
    assert signal.getsignal(signal.SIGINT) is handlers
    assert latest(tmp_path / "run") == 5


def test_a_run_whose_folder_was_taken_over_writes_nothing_more(run_of, finished, tmp_path, monkeypatch):
    """Also not the metrics of the steps until its next save: they would lie between those of the other process."""
    real_step, taken = loop.jit_train_step, []

    def failing(self):
        raise UserError("checkpoint", "2.saving", "could not be written")  # the new owner has removed it

    def watched(blueprint):
        step = real_step(blueprint)

        def take(state, batch):
            taken.append(1)
            if len(taken) == 3:
                monkeypatch.setattr(WriterLock, "_replaced", lambda self: True)
                monkeypatch.setattr("nagjax.runs.lock.STALE", -1.0)
                monkeypatch.setattr(Checkpoints, "wait", failing)
            return step(state, batch)

        return take

    monkeypatch.setattr(loop, "jit_train_step", watched)
    with pytest.raises(UserError, match="was taken over"):
        train(run_of(eval_every=100, save_every=100), tmp_path / "run")
    assert len(taken) == 3 and [step for step, _ in train_losses(tmp_path / "run")] == [1]  # each is read a step late


def test_minutes_count_from_the_last_save(run_of, tmp_path, monkeypatch):
    """Of a run whose steps take half a minute each, which saves every minute: at every second step."""
    now, make = types.SimpleNamespace(seconds=0.0), loop.jit_train_step

    def slow(blueprint):
        step = make(blueprint)

        def take(*args):
            now.seconds += 30.0
            return step(*args)

        return take

    monkeypatch.setattr(loop, "jit_train_step", slow)
    monkeypatch.setattr(loop, "SaveClock", lambda config: SaveClock(config, now=lambda: now.seconds))
    run = train(run_of(eval_every=100, save_every=100, save_minutes=1.0, keep=9), tmp_path / "run")
    assert steps_saved(run / "checkpoints") == [2, 4, 6]
