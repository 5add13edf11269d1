"""What a command says while it works: at once, line by line, and how far it is every few seconds."""

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from typing import TextIO

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for the tab and the new line


def say(text: str) -> None:
    """A line that is seen at once, also through a pipe."""
    write(sys.stdout, f"{visible(text)}\n")


def note(text: str) -> None:
    """The same of a command whose answer goes to stdout: to stderr."""
    write(sys.stderr, f"{visible(text)}\n")


def visible(text: str) -> str:
    """Without the characters that control a terminal, which a stranger's file or model may have in its texts."""
    return CONTROL.sub("?", text)


def for_terminal(text: str) -> str:
    """What a model wrote: `visible` where stdout is a terminal, as it is through a pipe."""
    return visible(text) if sys.stdout.isatty() else text


def write(stream: TextIO, text: str) -> None:
    """Writes the text at once. If nobody reads it any more, as the terminal's window was closed or what read standard
    error has ended, that stops no training. Standard output has a reader, or BrokenPipeError tells the command."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno != errno.EIO and not (error.errno == errno.EPIPE and stream is sys.stderr):
            raise
        silence(stream)


def silence(stream: TextIO) -> None:
    """What is written from now on, and what is still to be written out, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class Progress:
    """Says how far something is, at most every `every` seconds; silent where it is over sooner.

    `total` is what `done` ends with, for the time left; the first report is where the clock starts, so that what comes
    before it (compiling) does not count.
    """

    def __init__(self, what: str, total: int | None = None, *, every: float = 5.0, tell: Callable[[str], None] = say):
        self.what, self.total, self.every, self.tell = what, total, every, tell
        self._first: tuple[int, float] | None = None
        self._told = time.monotonic()

    def __call__(self, done: int, more: str = "") -> None:
        now = time.monotonic()
        self._first = self._first or (done, now)
        if now - self._told < self.every:
            return
        self._told = now
        of = f"/{self.total:,}" if self.total else ""
        self.tell(f"{self.what} {done:,}{of}{f', {more}' if more else ''}{self._left(done, now)}")

    def _left(self, done: int, now: float) -> str:
        start, began = self._first
        if not self.total or done <= start:
            return ""
        return f", {clock((now - began) / (done - start) * (self.total - done))} left"


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
