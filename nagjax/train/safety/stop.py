"""Ending a run early without losing anything: signals become a request that the loop answers."""

import signal
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

import jax

from nagjax.errors import Preempted

Item = TypeVar("Item")


class Interrupted(Exception):
    """A stop was asked for in the middle of something that is done again after the resume."""


class Stopper:
    """Turns the first SIGINT or SIGTERM into a request; a second one ends the process at once.

    SIGTERM is how clusters announce a preemption: it was served if the state is on disk, so the exit code is 0.
    Of several hosts one may be asked only; they all stop, after the same step: `signal` is what this one was asked,
    `asked` what all of them know of, and what `leave` answers.
    """

    def __enter__(self):
        self.signal = self.asked = 0
        self._old = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, _):
        self.signal = number
        signal.signal(number, self._old[number])

    def __exit__(self, *_):
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items until a stop is asked for, then Interrupted; all of them if there are other hosts to agree with."""
        for item in items:
            self._interrupt()
            yield item
        self._interrupt()

    def _interrupt(self) -> None:
        if self.signal and jax.process_count() == 1:
            self.asked = self.signal
            raise Interrupted

    def leave(self, step: int) -> None:
        """Raises what the signal asked for; to be called when everything is on disk."""
        if self.asked == signal.SIGTERM:
            if jax.process_index() == 0:
                print(
                    f"stopped at step {step} as asked (SIGTERM); the same command goes on from there", file=sys.stderr
                )
            raise Preempted
        raise KeyboardInterrupt
