"""nagjax profile: a trace of a few training steps, and where their time goes."""

from collections.abc import Sequence
from pathlib import Path

from nagjax.commands.options import parse_run


def profile(args: Sequence[str]) -> None:
    from nagjax.commands.profiling import profile as trace
    from nagjax.commands.profiling import report

    description = (
        "Trace a few training steps of a fresh model and tell which part of it the time goes to: embedding, attention, "
        "mlp, residual update, routing, head, optimizer. Options are those of `nagjax train`; --traced is the number "
        "of steps, --out the folder of the trace, for TensorBoard or XProf."
    )
    config, given = parse_run(args, "profile", description, [("traced", int, 5), ("out", Path, Path("runs/profile"))])
    print(report(trace(config, given.out, given.traced)))
    print(f"trace: {given.out}")
