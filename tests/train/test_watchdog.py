"""The watchdog tells where every thread is when a step hangs, and keeps quiet otherwise."""

import threading
import time
from contextlib import closing

from nagjax.train import loop, run
from nagjax.train.safety.watchdog import Watchdog


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def a_place_to_hang(leave):
    leave.wait()


def test_stacks_of_all_threads_once_per_hanging_step(tmp_path):
    path, leave = tmp_path / "stacks.txt", threading.Event()
    hanging = threading.Thread(target=a_place_to_hang, args=[leave])
    hanging.start()
    try:
        with path.open("w+") as stream, closing(Watchdog(least=0.2, stream=stream)) as watchdog:
            watchdog.watch(1)  # nothing is known yet: how long may the first step take?
            for _ in range(Watchdog.ENOUGH):
                watchdog.step_took(0.01)
            watchdog.watch(7)
            assert wait_for(lambda: "a_place_to_hang" in path.read_text())
            time.sleep(3 * Watchdog.LOOK)
            said = path.read_text()
            assert said.count("nagjax: step 7 has taken") == 1 and "step 1 " not in said
            assert "the median is 0.010 s" in said and "test_stacks_of_all_threads" in said
            watchdog.watch(8)
            assert wait_for(lambda: "step 8 has taken" in path.read_text())
    finally:
        leave.set()
        hanging.join()


def test_ten_times_the_median_and_at_least_so_much(tmp_path):
    path = tmp_path / "stacks.txt"
    with path.open("w+") as stream, closing(Watchdog(least=0.0, stream=stream)) as watchdog:
        for seconds in (0.1, 0.1, 0.1, 0.1, 90.0):  # one slow step does not move a median
            watchdog.step_took(seconds)
        began = time.monotonic()
        watchdog.watch(6)
        assert wait_for(path.read_text) and 1.0 <= time.monotonic() - began < 5.0


def test_a_run_is_watched(run_of, tmp_path, monkeypatch):
    path, make, calls = tmp_path / "stacks.txt", loop.jit_train_step, []

    def slow(blueprint):
        step = make(blueprint)

        def take(*args):
            calls.append(1)
            if len(calls) == 5:
                wait_for(path.read_text, 60.0)
            return step(*args)

        return take

    monkeypatch.setattr(run, "jit_train_step", slow)
    monkeypatch.setattr(Watchdog, "ENOUGH", 3)
    with path.open("w+") as stream:
        monkeypatch.setattr(loop, "Watchdog", lambda: Watchdog(least=0.3, stream=stream))
        loop.train(run_of(eval_every=100, save_every=100), tmp_path / "run")
    assert "step 4 has taken" in path.read_text() and "in take" in path.read_text()


def test_pauses(tmp_path):
    path = tmp_path / "stacks.txt"
    with path.open("w+") as stream, closing(Watchdog(least=0.15, stream=stream)) as watchdog:
        for _ in range(Watchdog.ENOUGH):
            watchdog.step_took(0.001)
        watchdog.watch(6)
        watchdog.pause()
        time.sleep(0.5)
    assert path.read_text() == ""
