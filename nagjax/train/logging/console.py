"""The live progress line of a run."""

import sys
import time


class ProgressLine:
    """Step, loss, speed and time left: rewritten in place on a terminal, a line every few seconds elsewhere."""

    def __init__(self, label: str, steps: int, *, start: int = 0, stream=None, every: float = 5.0, quiet: bool = False):
        self.label, self.steps, self.start, self.every = label, steps, start, every
        self.stream = stream or sys.stderr
        self.live, self.quiet = self.stream.isatty(), quiet
        self.began = self.shown = time.monotonic()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        if self.quiet:
            return
        now = time.monotonic()
        last = step >= self.steps
        if not last and now - self.shown < (0.1 if self.live else self.every):
            return
        self.shown = now
        done = max(step - self.start, 1)
        left = (now - self.began) / done * (self.steps - step)
        text = (
            f"{self.label}  step {step}/{self.steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  "
            f"ETA {int(left) // 60}:{int(left) % 60:02d}"
        )
        end = "\n" if last or not self.live else ""
        self.stream.write(f"\r\x1b[K{text}{end}" if self.live else f"{text}\n")
        self.stream.flush()
