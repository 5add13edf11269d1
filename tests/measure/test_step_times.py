"""What is timed, and by what it is divided, by a clock that goes as told."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.measure import sampling_times, step_times
from nagjax.measure.step_times import CompileTimes, Racer, StepTimes, race

FACTS = dict.fromkeys(("device", "devices", "cpu", "versions", "commit", "date"))


class Clock:
    """Seconds, and what happened. Calls return at once, and waiting for what they return takes six seconds."""

    def __init__(self):
        self.seconds, self.events = 10.0, []

    def block_until_ready(self, found):
        self.events.append(("waited", found))
        self.seconds += 6.0
        return found

    def put_into(self, monkeypatch, module) -> None:
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: self.seconds))
        monkeypatch.setattr(module.jax, "block_until_ready", self.block_until_ready)


@pytest.fixture
def clock():
    return Clock()


class Logged:
    def __init__(self, name: str, log: list):
        self.name, self.log = name, log

    def seconds(self, steps: int) -> float:
        self.log.append((self.name, steps))
        return float(len(self.log))


def test_racers_alternate_behind_two_steps_of_warm_up_each():
    log = []
    times = race({name: Logged(name, log) for name in "ab"}, rounds=2, steps=3)
    assert log == [("a", 2), ("b", 2), ("a", 3), ("b", 3), ("a", 3), ("b", 3)]
    assert times == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_a_step_is_timed_until_its_metrics_are_there(clock, monkeypatch):
    clock.put_into(monkeypatch, step_times)
    racer = object.__new__(Racer)
    racer.state, racer.batch = 0, 5
    racer.step = lambda state, batch: (state + batch, f"metrics of {state + batch}")
    assert racer.seconds(3) == 2.0
    assert racer.state == 15 and clock.events == [("waited", "metrics of 15")]


def test_a_ratio_is_of_two_times_of_one_round_and_to_the_first_scheme(monkeypatch):
    times = {"plain": [1.0, 2.0, 4.0], "nag": [3.0, 2.0, 16.0]}
    monkeypatch.setattr(step_times, "blueprint_of", lambda *shape: None)
    monkeypatch.setattr(step_times, "Racer", lambda *given: types.SimpleNamespace(blueprint=None))
    monkeypatch.setattr(step_times, "race", lambda *given: times)
    monkeypatch.setattr(step_times, "run_facts", lambda blueprint: FACTS)
    found = step_times.step_times(StepTimes(schemes=("plain", "nag"), batch=8))["results"]
    assert found == {"plain": {"milliseconds": 2000.0, "ratio": 1.0}, "nag": {"milliseconds": 3000.0, "ratio": 3.0}}


def test_a_deep_models_compilation_is_told_as_a_multiple_of_a_shallow_ones(monkeypatch):
    seconds = {12: iter([2.0, 9.0, 1.0]), 96: iter([3.0, 5.0, 8.0])}
    monkeypatch.setattr(step_times, "blueprint_of", lambda scheme, depth, *shape: depth)
    monkeypatch.setattr(step_times, "compiled_anew", lambda depth: (next(seconds[depth]), None))
    monkeypatch.setattr(step_times, "run_facts", lambda blueprint: FACTS)
    found = step_times.compile_times(CompileTimes(schemes=("nag",), batch=8))["results"]
    assert found == {"nag": {"shallow_seconds": 2.0, "deep_seconds": 5.0, "ratio": 2.5}}


def test_a_prompt_is_timed_until_it_is_read(clock, monkeypatch):
    clock.put_into(monkeypatch, sampling_times)
    racer = object.__new__(sampling_times.Racer)
    racer.bench = types.SimpleNamespace(phase="prefill")
    monkeypatch.setattr(racer, "_read", lambda: "rows", raising=False)
    assert racer.seconds(3) == 6.0 and clock.events == 3 * [("waited", "rows")]


def test_writing_is_timed_without_the_copy_of_the_cache_and_until_all_is_written(clock, monkeypatch):
    clock.put_into(monkeypatch, sampling_times)
    tokens = np.array([[7, 8]])

    def write(params, rows, *arguments, **options):
        clock.events.append("writes")
        return tokens, rows

    monkeypatch.setattr(sampling_times.decode, "write", write)
    racer = object.__new__(sampling_times.Racer)
    racer.bench = types.SimpleNamespace(phase="decode", steps=2, batch=1)
    racer.rows, racer.lengths = jnp.zeros(3), np.array([4])
    racer.params = racer.graph = racer.given = None
    assert racer.seconds(1) == 6.0
    (first, copied), called, (last, written) = clock.events
    assert (first, called, last) == ("waited", "writes", "waited") and copied is not racer.rows and written is tokens
    assert racer.written.tolist() == [[7, 8]]
