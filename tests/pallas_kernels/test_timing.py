"""By what a time is divided, and what it waits for, by a clock that goes as told."""

import math
import types

import jax.numpy as jnp
import pytest

from pallas_kernels import timing


def test_what_is_run_is_timed_until_the_last_of_it_is_computed(monkeypatch):
    """Calls return at once, and waiting takes three seconds."""
    now, waited, calls = types.SimpleNamespace(seconds=10.0), [], iter("abcd")

    def wait(out):
        waited.append(out)
        now.seconds += 3.0

    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now.seconds))
    monkeypatch.setattr(timing.jax, "block_until_ready", wait)
    assert timing.running(lambda: next(calls))(4) == 3.0 and waited == ["d"]


def test_seconds_of_one_are_the_median_of_many_that_are_queued_together():
    """As many as make ROUND_SECONDS by a first look; the third round is ten times as slow."""
    one, asked = 2.0**-8, []

    def run(times: int) -> float:
        asked.append(times)
        return times * one * (10 if len(asked) == 4 else 1)

    assert timing.queued(run, 3) == one
    assert asked == [2] + 3 * [math.ceil(timing.ROUND_SECONDS / one)]


def test_the_time_of_a_program_is_divided_by_its_calls(monkeypatch):
    """Each visits 32 bytes twice. By the bytes that a program is to visit it has six calls; by its time 30."""
    monkeypatch.setattr(timing, "PROGRAM_BYTES", 6 * 64)
    monkeypatch.setattr(timing, "queued", lambda run, repeats: 6.0)
    given = (lambda x: -x, lambda key: (jnp.ones(8),))
    assert timing.microseconds(*given, rotate=0, repeats=1) == 6e6
    for share, calls in ((1, 6), (5, 30)):
        monkeypatch.setattr(timing, "warmed", lambda run, share=share: timing.PROGRAM_SECONDS / share)
        assert timing.microseconds(*given, rotate=2 * 64, repeats=1) == pytest.approx(6e6 / calls)
