"""How much of a model's depth is used, and which blocks could go: a report."""

from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL
from nagjax.console import say
from nagjax.ranges import Count


def main(
    run: Annotated[Path, POSITIONAL],
    out: Path | None = None,
    data: str | None = None,
    batches: Count = 4,
    skip_batches: Count = 4,
    curve_batches: Count = 8,
) -> None:
    """How much of a model's depth is used, and which of its blocks could go: diagnosis.html and diagnosis.json.

    Args:
        run: a run folder, or a model that nagjax import reads.
        out: where the two files go; the run's folder by default.
        data: another corpus with the same tokenizer; the run's own by default.
        batches: of the run's size, for what one pass shows.
        skip_batches: for leaving out each block; one pass of twice the length for each block and batch.
        curve_batches: for the loss without several blocks.
    """
    say(f"diagnosing {run}, into {out or run}")
    from nagjax.interop.load import load
    from nagjax.report.diagnose_report import write_diagnosis
    from nagjax.report.diagnosis import Effort, diagnose

    opened = load(run)
    say(repr(opened))
    record = diagnose(opened, Effort(batches, skip_batches, curve_batches), data, say=say)
    page = write_diagnosis(record, out or run)
    print(f"{record['verdict']}\n{page}")
