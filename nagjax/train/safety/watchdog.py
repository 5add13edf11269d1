"""Shows where a run hangs: records the stacks of all threads when a step takes far longer than the steps before it."""

import collections
import faulthandler
import os
import statistics
import sys
import threading
import time
from pathlib import Path

from nagjax.console import write


class Watchdog:
    """If a step takes `FACTOR` times the median of the last `WINDOW` steps, prints one line, and appends the stacks of
    all threads to the file `stacks`; once for each such step.

    A separate thread watches the clock; the loop only tells it when a step begins and how long the last one took. Steps
    shorter than `least` seconds are never reported, and nothing is reported before `ENOUGH` steps were timed.
    """

    FACTOR, WINDOW, ENOUGH, LOOK = 10, 100, 5, 0.1

    def __init__(self, stacks: Path, least: float = 5.0, stream=None):
        self.stacks, self.least, self.stream = stacks, least, stream or sys.__stderr__ or sys.stderr
        self._seconds: collections.deque[float] = collections.deque(maxlen=self.WINDOW)
        self._watched: tuple[int, float, float] | None = None  # step, when it began, the usual duration in seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def step_took(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def watch(self, step: int) -> None:
        """Starts waiting for step `step`."""
        if len(self._seconds) >= self.ENOUGH:
            self._watched = step, time.monotonic(), statistics.median(self._seconds)

    def pause(self) -> None:
        """Stops watching: evaluations and saves are not steps."""
        self._watched = None

    def _run(self) -> None:
        reported = None
        while not self._closed.wait(self.LOOK):
            watched = self._watched
            if watched is None or watched is reported:
                continue
            step, began, usual = watched
            if (seconds := time.monotonic() - began) >= max(self.FACTOR * usual, self.least):
                reported = watched  # each step is reported once
                self._report(step, seconds, usual)

    def _report(self, step: int, seconds: float, usual: float) -> None:
        told = f"step {step} has taken {seconds:.1f} s so far, the median is {usual:.3f} s"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            with os.fdopen(os.open(self.stacks, flags, 0o666), "w") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {told}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            where = f"the stacks of all threads are in {self.stacks}"
        except OSError as error:
            where = f"{self.stacks} cannot be written ({error.strerror})"
        write(self.stream, f"nagjax: {told}; {where}\n")

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
