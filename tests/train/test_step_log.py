"""Seconds, tokens per second and MFU of steps, by a clock that goes as told."""

import json
import types
from collections import Counter
from unittest.mock import Mock

import jax
import pytest

from nagjax.train import loop
from nagjax.train.checkpoint.store import Checkpoints
from nagjax.train.logging import steplog
from nagjax.train.logging.steplog import StepLog
from nagjax.train.step import StepMetrics
from tests.train.test_guard import poison

H200 = {"device": "NVIDIA H200", "devices": 2, "train_flops_per_token": 7}


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the log of steps reads."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(steplog, "time", types.SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def metrics() -> StepMetrics:
    return StepMetrics(**dict.fromkeys(StepMetrics._fields, 0.0))


def test_seconds_and_tokens_and_flops_of_a_step(clock):
    """989e12 FLOPs per second is the dense bfloat16 peak of each of the two devices."""
    writers, watchdog = Mock(), Mock()
    log = StepLog(writers, Mock(), 100, H200, watchdog)

    def written(step: int) -> list[tuple[float, float, float]]:
        log.add(step, metrics())
        found = [call.kwargs for call in writers.write.call_args_list]
        writers.reset_mock()
        return [(own["step_seconds"], own["tokens_per_second"], own["mfu"]) for own in found]

    half = (0.5, 200.0, pytest.approx(200 * 7 / (2 * 989e12), rel=1e-9, abs=0.0))
    assert not written(1)
    clock.seconds += 0.5
    assert written(2) == [half]
    clock.seconds += 0.5
    assert written(3) == [half]
    clock.seconds += 9.0
    log.restart_clock()
    clock.seconds += 0.5
    assert written(4) == [half]
    log.pending.append((5, metrics()))  # two that are read at once
    clock.seconds += 1.0
    assert written(6) == [half, half]
    assert {call.args for call in watchdog.step_took.call_args_list} == {(0.5,)}


def test_evaluations_and_saves_and_going_back_are_no_time_of_steps(run_of, clock, tmp_path, monkeypatch):
    """Reading a step takes half a second here, and everything else that a run does far longer. It saves where
    it has evaluated; step 5 is bad, and it goes back to step 4."""
    done = Counter()

    def slower(by: float, function):
        def take(*args, **options):
            done[by] += 1
            clock.seconds += by
            return function(*args, **options)

        return take

    poison(monkeypatch, {4})
    monkeypatch.setattr(steplog, "jax", types.SimpleNamespace(device_get=slower(0.5, jax.device_get)))
    monkeypatch.setattr(loop.Loop, "_scores", slower(10.0, loop.Loop._scores))
    monkeypatch.setattr(Checkpoints, "save", slower(100.0, Checkpoints.save))
    monkeypatch.setattr(loop, "state_at", slower(1000.0, loop.state_at))
    run = loop.train(run_of(eval_every=2, save_every=100, keep_best=1, on_bad_step="rollback"), tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [(line["step"], line["step_seconds"]) for line in lines if line["kind"] == "train"]
    assert times == [(step, 0.5) for step in range(1, 7)]
    assert (done[10.0], done[100.0], done[1000.0]) == (4, 3, 2)
