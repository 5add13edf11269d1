"""Metrics of steps, read one step late so that the devices never wait for the host."""

import math
import time

import jax

from nagjax.errors import UserError
from nagjax.train.console import ProgressLine
from nagjax.train.facts import peak_flops
from nagjax.train.metrics import Writers
from nagjax.train.step import StepMetrics


class StepLog:
    """Takes the metrics of each step as it is dispatched, and writes those of the steps before it."""

    def __init__(self, writers: Writers, line: ProgressLine, tokens_per_step: int, facts: dict):
        self.writers, self.line, self.tokens_per_step = writers, line, tokens_per_step
        peak = peak_flops(facts["device"])
        self.peak_tokens = peak * facts["devices"] / facts["train_flops_per_token"] if peak else None
        self.pending: list[tuple[int, StepMetrics]] = []
        self.began = self.clock = time.perf_counter()

    def add(self, step: int, metrics: StepMetrics) -> None:
        """Metrics of a step that was just dispatched; writes those of the previous one."""
        self.flush()
        self.pending.append((step, metrics))

    def restart_clock(self) -> None:
        """What happened since the last step does not count as its time."""
        self.clock = time.perf_counter()

    def flush(self) -> None:
        """Waits for the pending steps and writes their metrics.

        MFU is training FLOPs per token times tokens per second over the devices' dense bfloat16 peak.
        Raises UserError for a loss or gradient that is not finite.
        """
        if not self.pending:
            return
        fetched = jax.device_get([metrics for _, metrics in self.pending])
        now = time.perf_counter()
        seconds, self.clock = (now - self.clock) / len(fetched), now
        speed = self.tokens_per_step / seconds
        for (step, _), metrics in zip(self.pending, fetched, strict=True):
            values = {name: float(value) for name, value in metrics._asdict().items()}
            values |= {
                "tokens": step * self.tokens_per_step,
                "tokens_per_second": speed,
                "step_seconds": seconds,
            }
            self.writers.write("train", step, **values, mfu=speed / self.peak_tokens if self.peak_tokens else None)
            since_start = (step - self.line.start) * self.tokens_per_step / (now - self.began)
            self.line.update(step, values["loss"], since_start)
            for field in ("loss", "grad_norm"):
                if not math.isfinite(values[field]):
                    fix = f"not finite at step {step}: train anew with a lower --lr; the last checkpoint is kept"
                    raise UserError(field, values[field], fix)
        self.pending.clear()
