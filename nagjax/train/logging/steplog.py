"""Logs the metrics of each step one step late, so that the devices never wait for the host."""

import dataclasses
import math
import time

import jax

from nagjax.runs.facts import peak_flops
from nagjax.train.logging.console import ProgressLine
from nagjax.train.logging.metrics import Writers
from nagjax.train.safety.watchdog import Watchdog
from nagjax.train.step import StepMetrics


@dataclasses.dataclass(frozen=True)
class BadStep:
    """A step that did not change the state because its loss or gradient was bad."""

    step: int
    in_a_row: int
    loss: float
    grad_norm: float

    @property
    def field(self) -> str:
        """The metric that was bad: loss or gradient norm."""
        return "grad_norm" if math.isfinite(self.loss) and not math.isfinite(self.grad_norm) else "loss"

    @property
    def value(self) -> float:
        return getattr(self, self.field)

    @property
    def reason(self) -> str:
        return "a spike" if math.isfinite(self.value) else "not finite"


class StepLog:
    """Takes the metrics of each step when it is dispatched, and writes those of the step before it."""

    def __init__(self, writers: Writers, line: ProgressLine, tokens_per_step: int, facts: dict, watchdog: Watchdog):
        self.writers, self.line, self.tokens_per_step, self.watchdog = writers, line, tokens_per_step, watchdog
        peak = peak_flops(facts["device"])
        self.peak_tokens = peak * facts["devices"] / facts["train_flops_per_token"] if peak else None
        self.pending: list[tuple[int, StepMetrics]] = []
        self.clock = time.perf_counter()

    def add(self, step: int, metrics: StepMetrics) -> list[BadStep]:
        """Takes the metrics of a step that was just dispatched, writes those of the previous step, and returns that
        step if bad."""
        bad = self.flush()
        self.pending.append((step, metrics))
        self.watchdog.watch(step)
        return bad

    def forget(self) -> None:
        """Drops the pending steps, because they will be done again."""
        self.pending.clear()

    def pause(self) -> None:
        """Tells the watchdog that something other than a step begins, such as an evaluation."""
        self.watchdog.pause()

    def restart_clock(self) -> None:
        """Restarts the clock, so that the time spent since the last step does not count towards the next one."""
        self.clock = time.perf_counter()

    def flush(self) -> list[BadStep]:
        """Waits for the pending steps and writes their metrics; returns the bad ones among them.

        MFU is training FLOPs per token times tokens per second over the devices' dense bfloat16 peak.
        """
        if not self.pending:
            return []
        fetched = jax.device_get([metrics for _, metrics in self.pending])
        now = time.perf_counter()
        seconds, self.clock = (now - self.clock) / len(fetched), now
        self.watchdog.step_took(seconds)
        speed = self.tokens_per_step / seconds
        bad = []
        for (step, _), metrics in zip(self.pending, fetched, strict=True):
            values = {name: float(value) for name, value in metrics._asdict().items() if value is not None}
            in_a_row = int(values.pop("bad"))
            values |= {"tokens": step * self.tokens_per_step, "tokens_per_second": speed, "step_seconds": seconds}
            if in_a_row:
                bad.append(BadStep(step, in_a_row, values["loss"], values["grad_norm"]))
                values["skipped"] = True
            self.writers.write("train", step, **values, mfu=speed / self.peak_tokens if self.peak_tokens else None)
            self.line.update(step, values["loss"])
        self.pending.clear()
        return bad
