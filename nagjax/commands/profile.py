"""Trace a few training steps and tell which part of the model takes how long."""

from pathlib import Path

from nagjax.console import say
from nagjax.options import RunOptions
from nagjax.ranges import Count


def main(options: RunOptions, traced: Count = 5, out: Path = Path("runs/profile")) -> None:
    """Trace a few training steps of a fresh model and tell which part of it the time goes to: embedding, attention,
    mlp, residual update, routing, head, optimizer.

    Args:
        traced: steps in the trace.
        out: folder of the trace, for TensorBoard or XProf.
    """
    say(f"{options}: compiling, then {traced} traced steps")
    from nagjax.measure.profile import profile, report

    print(report(profile(options.config(), out, traced)))
    print(f"trace: {out}")
