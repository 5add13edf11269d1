"""The live progress line of a run."""

import shutil
import sys
import time

from nagjax.console import clock, write

UNSETTLED = 2  # first steps, which may include compilation


class ProgressLine:
    """Shows step, loss, the results of the last evaluation, speed and time left: on a terminal in place, elsewhere as a
    line every few seconds.

    Speed and time left leave out the first steps, so that compilation does not count.
    """

    def __init__(
        self,
        label: str,
        steps: int,
        tokens_per_step: int,
        *,
        start: int = 0,
        stream=None,
        every: float = 5.0,
        quiet: bool = False,
    ):
        self.label, self.steps, self.start, self.tokens_per_step = label, steps, start, tokens_per_step
        self.every, self.stream, self.quiet = every, stream or sys.stderr, quiet
        self.live, self.shown = self.stream.isatty(), time.monotonic()
        self.origin: tuple[int, float] | None = None  # the first step timed, and when it was done
        self.found = ""

    def evaluated(self, step: int, loss: float, answers: dict[str, float]) -> None:
        """Takes the validation loss (nats per token) and the first score of every task, which are shown from now on;
        after the last step, shown at once."""
        first = {name.partition("/")[0]: (name, score) for name, score in reversed(answers.items())}
        scores = [("validation", loss), *reversed(first.values())]
        self.found = "".join(f"  {name} {score:.4f}" for name, score in scores)
        if step >= self.steps and not self.quiet:
            write(self.stream, f"{self.label}  step {step}/{self.steps}{self.found}\n")

    def update(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if self.origin is None and step >= self.start + UNSETTLED:
            self.origin = step, now
        last = step >= self.steps
        if self.quiet or (not last and now - self.shown < (0.1 if self.live else self.every)):
            return
        self.shown = now
        text = f"{self.label}  step {step}/{self.steps}  loss {loss:.4f}{self.found}{self._speed(step, now)}"
        text = text[: shutil.get_terminal_size().columns - 1] if self.live else text
        end = "\n" if last or not self.live else ""
        write(self.stream, f"\r\x1b[K{text}{end}" if self.live else f"{text}\n")

    def _speed(self, step: int, now: float) -> str:
        if self.origin is None or step <= self.origin[0]:
            return ""
        each = (now - self.origin[1]) / (step - self.origin[0])
        return f"  {self.tokens_per_step / each:,.0f} tokens/s  ETA {clock(each * (self.steps - step))}"
