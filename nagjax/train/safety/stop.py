"""Stops a run early without losing anything: a signal becomes a request that the loop answers."""

import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from nagjax.console import note
from nagjax.errors import Preempted

GRACE = 5.0  # seconds in which a loop that has nothing to save yet may stop by itself
REPEAT = 2.0  # seconds in which a repeated signal is the same request, sent to both process and group


GOES_ON = "the same command, without --fresh, goes on"


class Interrupted(Exception):
    """A stop was requested during work that will be done again after the resume."""


class Stopper:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request. The same signal again, `REPEAT` seconds later or more,
    ends the process at once, and what was not saved is lost. (Python handles SIGINT only once the running step has
    returned.)

    Clusters announce a preemption with SIGTERM, and a terminal that closes sends SIGHUP, which is left alone if it is
    ignored (nohup). For both the exit code is 0, because the request is met once the state is on disk. If only one of
    several hosts gets a signal, all stop after the same step: `signal` is what this host received, `asked` is what all
    hosts know of, and `leave` answers it.

    Until the first step is done (`settled`) there is nothing to save, and compilation may not return to Python for
    minutes. During that time a thread, which learns of the signal at once, ends the process after `GRACE` seconds.

    Python lets only the main thread handle signals. If this is made in another thread, it handles none.
    """

    def __enter__(self):
        self.signal = self.asked = 0
        self.settled = False
        self._old: dict[int, Any] = {}
        self._noted: dict[int, float] = {}
        if threading.current_thread() is threading.main_thread():
            self._listen()
        return self

    def _listen(self) -> None:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._old = {number: signal.signal(number, self._note) for number in numbers}
        read, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._old_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        threading.Thread(target=self._answer_at_once, args=[read], name="stopper", daemon=True).start()

    def _answer_at_once(self, read: int) -> None:
        """Reports that a request was received, and ends the process where the main thread cannot. Runs in the
        thread."""
        came: dict[int, float] = {}  # when each signal first came
        heard = 0  # the request not answered yet
        with os.fdopen(read, "rb", buffering=0) as signals:
            waiting = select.poll()  # unlike select.select it takes descriptors of any number
            waiting.register(signals, select.POLLIN)
            while True:
                if waiting.poll(50 if heard else None):
                    if not (found := signals.read(1)):
                        return
                    number = found[0]
                    if number in came and time.monotonic() - came[number] > REPEAT:
                        if self._old[number] is signal.SIG_DFL:
                            _end_now(number, 128 + number, "without saving, as asked twice")
                    elif number in self._old and number not in came:
                        came[number], heard = time.monotonic(), number
                elif self.settled:
                    what = "saves and ends after this step; once more ends it without saving"
                    note(f"\nasked to stop ({signal.Signals(heard).name}): {what}")
                    heard = 0
                elif time.monotonic() > came[heard] + GRACE:
                    _end_now(heard, 130 if heard == signal.SIGINT else 0, "before the first step, as asked")

    def _note(self, number, _):
        now = time.monotonic()
        if now - self._noted.setdefault(number, now) > REPEAT:
            signal.signal(number, self._old[number])
            signal.raise_signal(number)
        self.signal = number

    def __exit__(self, *_):
        self.settled = True
        if not self._old:
            return
        signal.set_wakeup_fd(self._old_wake)
        os.close(self._wake)
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def watch[Item](self, items: Iterable[Item]) -> Iterator[Item]:
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
        """Raises KeyboardInterrupt after SIGINT, else Preempted. Call it once everything is on disk."""
        number = self.asked or self.signal
        if number in (signal.SIGTERM, signal.SIGHUP):
            if jax.process_index() == 0:
                then = "nothing is left to do" if complete else f"{GOES_ON} from there"
                note(f"stopped at step {step} as asked ({signal.Signals(number).name}); {then}")
            raise Preempted
        raise KeyboardInterrupt


def _end_now(number: int, code: int, how: str) -> None:
    note(f"\nstopped {how} ({signal.Signals(number).name}); {GOES_ON}")
    for child in multiprocessing.active_children():  # the data workers
        child.kill()
    os._exit(code)
