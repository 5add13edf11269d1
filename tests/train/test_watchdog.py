"""The watchdog shows where every thread is when a step hangs, and is silent otherwise."""

import io
import threading
import time
from contextlib import closing

from nagjax.train import loop
from nagjax.train.safety.watchdog import Watchdog


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def a_place_to_hang(leave):
    leave.wait()


def test_a_line_and_the_stacks_of_all_threads_once_per_hanging_step(tmp_path):
    path, leave, said = tmp_path / "stacks.txt", threading.Event(), io.StringIO()
    hanging = threading.Thread(target=a_place_to_hang, args=[leave])
    hanging.start()
    try:
        with closing(Watchdog(path, least=0.2, stream=said)) as watchdog:
            for _ in range(Watchdog.ENOUGH - 1):
                watchdog.step_took(0.01)
            watchdog.watch(1)  # too little is known: how long may it take?
            time.sleep(0.2 + 3 * Watchdog.LOOK)
            assert said.getvalue() == ""
            watchdog.step_took(0.01)
            watchdog.watch(7)
            assert wait_for(lambda: "step 7 has taken" in said.getvalue())
            time.sleep(3 * Watchdog.LOOK)
            assert said.getvalue().count("\n") == 1 and str(path) in said.getvalue()
            stacks = path.read_text()
            assert stacks.count("step 7 has taken") == 1 and "step 1 " not in stacks and "a_place_to_hang" in stacks
            assert "the median is 0.010 s" in stacks and "test_a_line_and_the_stacks" in stacks
            watchdog.watch(8)
            assert wait_for(lambda: "step 8 has taken" in said.getvalue())
            assert "step 7 has taken" in path.read_text() and "step 8 has taken" in path.read_text()
    finally:
        leave.set()
        hanging.join()


def test_a_link_in_the_place_of_the_file_is_not_written_through(tmp_path):
    said, mine = io.StringIO(), tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "stacks.txt").symlink_to(mine)
    with closing(Watchdog(tmp_path / "stacks.txt", least=0.1, stream=said)) as watchdog:
        for _ in range(Watchdog.ENOUGH):
            watchdog.step_took(0.001)
        watchdog.watch(6)
        assert wait_for(lambda: "cannot be written" in said.getvalue())
    assert mine.read_text() == "mine"


def test_ten_times_the_median_and_at_least_so_much(tmp_path):
    said = io.StringIO()
    with closing(Watchdog(tmp_path / "stacks.txt", least=0.0, stream=said)) as watchdog:
        for seconds in (0.1, 0.1, 0.1, 0.1, 90.0):  # one slow step does not move a median
            watchdog.step_took(seconds)
        began = time.monotonic()
        watchdog.watch(6)
        assert wait_for(said.getvalue) and 1.0 <= time.monotonic() - began < 5.0


def test_a_run_is_watched(run_of, tmp_path, monkeypatch):
    path, make, calls = tmp_path / "run" / "stacks.txt", loop.jit_train_step, []

    def slow(blueprint):
        step = make(blueprint)

        def take(*args):
            calls.append(1)
            if len(calls) == 5:
                wait_for(path.exists, 60.0)
                wait_for(path.read_text, 60.0)
            return step(*args)

        return take

    monkeypatch.setattr(loop, "jit_train_step", slow)
    monkeypatch.setattr(Watchdog, "ENOUGH", 3)
    monkeypatch.setattr(loop, "Watchdog", lambda stacks: Watchdog(stacks, least=0.3, stream=io.StringIO()))
    loop.train(run_of(eval_every=100, save_every=100), tmp_path / "run")
    assert "step 4 has taken" in path.read_text() and "in take" in path.read_text()


def test_pauses(tmp_path):
    said = io.StringIO()
    with closing(Watchdog(tmp_path / "stacks.txt", least=0.15, stream=said)) as watchdog:
        for _ in range(Watchdog.ENOUGH):
            watchdog.step_took(0.001)
        watchdog.watch(6)
        watchdog.pause()
        time.sleep(0.5)
    assert said.getvalue() == ""
