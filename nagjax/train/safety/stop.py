"""Stops a run early without losing anything: a signal becomes a request that the loop answers."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import jax

from nagjax.errors import Preempted

Item = TypeVar("Item")
GRACE = 5.0  # seconds in which a loop that has nothing to save yet may answer by itself


class Interrupted(Exception):
    """A stop was requested during something that will be done again after the resume."""


class Stopper:
    """Turns the first SIGINT or SIGTERM into a request; a second one ends the process at once.

    Clusters announce a preemption with SIGTERM: once the state is on disk the request is met, so the exit code is 0. If
    only one of several hosts gets a signal, all stop after the same step: `signal` is what this host received, `asked`
    is what all hosts know of, and `leave` answers it.

    Until the first step is done (`settled`) there is nothing to save, and compiling may not return to Python for
    minutes. During that time a thread, which learns of the signal at once, ends the process after `GRACE` seconds.

    Python lets only the main thread handle signals: in another one they are left to whoever handles them.
    """

    def __enter__(self):
        self.signal = self.asked = 0
        self.settled = False
        self._old = {}
        if threading.current_thread() is threading.main_thread():
            self._listen()
        return self

    def _listen(self) -> None:
        self._old = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        read, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._old_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        threading.Thread(target=self._end_where_nobody_answers, args=[read], name="stopper", daemon=True).start()

    def _end_where_nobody_answers(self, read: int) -> None:
        with os.fdopen(read, "rb", buffering=0) as signals:
            while number := signals.read(1):
                deadline = time.monotonic() + GRACE
                while not self.settled and time.monotonic() < deadline:
                    time.sleep(0.05)
                if not self.settled and number[0] in self._old:
                    _end_now(number[0])

    def _note(self, number, _):
        self.signal = number
        signal.signal(number, self._old[number])

    def __exit__(self, *_):
        self.settled = True
        if not self._old:
            return
        signal.set_wakeup_fd(self._old_wake)
        os.close(self._wake)
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items; raises Interrupted if a stop is requested. With several hosts it yields all items."""
        for item in items:
            self._interrupt()
            yield item
        self._interrupt()

    def _interrupt(self) -> None:
        if self.signal and jax.process_count() == 1:
            self.asked = self.signal
            raise Interrupted

    def leave(self, step: int, complete: bool = False) -> None:
        """Raises Preempted or KeyboardInterrupt, according to the signal; call it when everything is on disk."""
        if (self.asked or self.signal) == signal.SIGTERM:
            if jax.process_index() == 0:
                then = "nothing is left to do" if complete else "the same command goes on from there"
                print(f"stopped at step {step} as asked (SIGTERM); {then}", file=sys.stderr)
            raise Preempted
        raise KeyboardInterrupt


def _end_now(number: int) -> None:
    name = signal.Signals(number).name
    text = f"\nstopped before the first step, as asked ({name}); the same command goes on"
    print(text, file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():  # the workers that make batches
        child.kill()
    os._exit(0 if number == signal.SIGTERM else 130)
