"""By what a time is divided, and what it waits for, by a clock that goes as told."""

import math
import types

import jax.numpy as jnp
import pytest

from pallas_kernels import timing


def test_what_is_run_is_timed_until_the_last_of_it_is_computed(monkeypatch):
    """Calls return at once, and waiting takes three seconds."""
    now, waited, calls = clock(monkeypatch, waiting=3.0), [], iter("abcd")
    monkeypatch.setattr(timing.jax, "block_until_ready", lambda out: (waited.append(out), now.wait()))
    assert timing.Running(lambda: next(calls))(4) == 3.0 and waited == ["d"]


def clock(monkeypatch, waiting: float) -> types.SimpleNamespace:
    """A clock that goes on by `waiting` seconds when results are awaited."""
    now = types.SimpleNamespace(seconds=10.0)
    now.wait = lambda *_: now.pass_by(waiting)
    now.pass_by = lambda seconds: setattr(now, "seconds", now.seconds + seconds)
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now.seconds))
    monkeypatch.setattr(timing.jax, "block_until_ready", now.wait)
    return now


@pytest.mark.parametrize(
    "times, starting, waiting, by_host",
    [
        (60, 1.0, 0.5, True),  # each is done before the next one starts
        (60, 1.0, 30.0, False),  # the host had to wait until the queue had room again
        (60, 0.1, 54.0, False),
        (1, 0.1, 20.0, False),  # one long call
        (1, 1.0, 0.5, True),
    ],
)
def test_a_device_that_waits_for_the_host_is_noticed(monkeypatch, times, starting, waiting, by_host):
    now = clock(monkeypatch, waiting)
    run = timing.Running(lambda: now.pass_by(starting))
    run(times)
    assert run.by_host == by_host


def test_seconds_of_one_are_the_median_of_many_that_are_queued_together():
    """As many as make ROUND_SECONDS by a first look; the third round is ten times as slow, and by the host."""
    one, asked = 2.0**-8, []

    class Run:
        by_host = property(lambda self: len(asked) == 4)

        def __call__(self, times: int) -> float:
            asked.append(times)
            return times * one * (10 if self.by_host else 1)

    assert timing.queued(Run(), 3) == (one, False)
    assert asked == [2] + 3 * [math.ceil(timing.ROUND_SECONDS / one)]


def test_the_time_of_a_program_is_divided_by_its_calls(monkeypatch):
    """Each visits 32 bytes twice. By the bytes that a program is to visit it has six calls; by its time 30."""
    monkeypatch.setattr(timing, "PROGRAM_BYTES", 6 * 64)
    monkeypatch.setattr(timing, "queued", lambda run, repeats: timing.Taken(6.0, by_host=True))
    given = (lambda x: -x, lambda key: (jnp.ones(8),))
    assert timing.timed(*given, rotate=0, repeats=1) == (6.0, False)  # a CPU is its own host
    for share, calls in ((1, 6), (5, 30)):
        monkeypatch.setattr(timing, "warmed", lambda run, share=share: timing.PROGRAM_SECONDS / share)
        assert timing.timed(*given, rotate=2 * 64, repeats=1) == (pytest.approx(6.0 / calls), True)
