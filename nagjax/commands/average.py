"""Average a run's checkpoints; the average is a new run."""

from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL
from nagjax.console import say
from nagjax.ranges import Count


def main(
    run: Annotated[Path, POSITIONAL],
    out: Path,
    newest: Count | None = None,
    steps: tuple[Count, ...] = (),
    data: str | None = None,
    batches: Count = 8,
) -> None:
    """Average the weights of a run's checkpoints and save them as a new run; the source run is not changed.

    Args:
        run: a run folder; train it with --keep N or --keep-every N to have several checkpoints.
        out: the new run's folder.
        newest: average this many of the newest checkpoints; without this and without --steps, all checkpoints.
        steps: average the checkpoints of these steps.
        data: another corpus with the same tokenizer to measure losses on; by default the run's own, or stdlib for an
            imported model.
        batches: validation batches for each loss.
    """
    say(f"averaging checkpoints of {run}, into {out}")
    from nagjax.report.averaging import average
    from nagjax.report.labels import number

    record = average(run, out, newest=newest, steps=steps, data=data, batches=batches)
    loss, steps = record["loss"], record["steps"]
    told = f"loss {number(loss['average'], 4)}, of step {steps[-1]} alone {number(loss['newest'], 4)}"
    print(f"steps {', '.join(map(str, steps))}: {told}\n{out}")
