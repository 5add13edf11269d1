"""Trace a few training steps and show how long each part of the model takes."""

from pathlib import Path

from nagjax.console import say
from nagjax.files import check_writable
from nagjax.memory import keep_freed_memory
from nagjax.options import RunOptions
from nagjax.ranges import Count


def main(options: RunOptions, traced: Count = 5, out: Path = Path("runs/profile")) -> None:
    """Trace a few training steps of a fresh model and show how long each part takes: embedding, attention, mlp,
    residual update, routing, head, optimizer.

    Args:
        traced: number of steps in the trace.
        out: folder for the trace, which TensorBoard or XProf can open.
    """
    check_writable(out)
    say(f"{options}: compiling, then {traced} traced steps")
    keep_freed_memory()
    from nagjax.measure.profile import profile, report

    print(report(profile(options.config(), out, traced)))
    print(f"trace: {out}")
