"""What a command prints while it works: lines that appear at once, and its progress every few seconds."""

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from typing import TextIO

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all control characters but tab and newline


def say(text: str) -> None:
    """Prints a line to stdout, which appears at once, also through a pipe."""
    write(sys.stdout, f"{visible(text)}\n")


def note(text: str) -> None:
    """Prints a line to stderr, for a command whose answer goes to stdout."""
    write(sys.stderr, f"{visible(text)}\n")


def visible(text: str) -> str:
    """The text with "?" for the characters that control a terminal, which somebody else's file or model may contain."""
    return CONTROL.sub("?", text)


def for_terminal(text: str) -> str:
    """A model's text: `visible` if stdout is a terminal, unchanged through a pipe."""
    return visible(text) if sys.stdout.isatty() else text


def write(stream: TextIO, text: str) -> None:
    """Writes the text at once. If its reader is gone (the terminal's window was closed, or the process that read
    standard error has ended), training goes on and the stream is silenced. For standard output through a pipe it raises
    BrokenPipeError, which ends the command."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno != errno.EIO and not (error.errno == errno.EPIPE and stream is sys.stderr):
            raise
        silence(stream)


def silence(stream: TextIO) -> None:
    """Discards what is still buffered in the stream and what will be written to it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class Progress:
    """Reports progress, at most every `every` seconds; prints nothing if the work is over sooner.

    `total` is the last value of `done`, from which the time left is estimated. The clock starts at the first report, so
    that work before it (compiling) does not count.
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
