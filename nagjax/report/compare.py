"""The function behind `nagjax compare RUN RUN...`."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from nagjax.console import visible
from nagjax.errors import UserError
from nagjax.files import check_writable
from nagjax.report.report import build_report, save_report
from nagjax.report.table import to_rich
from nagjax.runs.log import Run, load_run
from nagjax.runs.names import CHECKPOINTS
from nagjax.train.checkpoint.store import steps_saved


def compare(paths: Sequence[str | Path], out: str | Path, console: Console | None = None) -> Path:
    """Prints the comparison of two or more run folders and writes it to `out` with its figures.

    Writes `report.html`, `report.md` and `figures/*.png`; returns the path of the HTML page. Runs that differ in data,
    model, seed, batch or token budget are compared all the same, and the differing fields are named. Raises `UserError`
    for fewer than two runs, for the same run twice, and for whatever `load_run` refuses.
    """
    console = console or Console()
    if len(paths) < 2:
        raise UserError("runs", [str(path) for path in paths], "give two or more run folders to compare")
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise UserError("runs", [str(path) for path in paths], "give each run folder once")
    runs = [load_run(path) for path in paths]
    check_writable(out)
    late = [line for run in runs if (line := behind(run))]
    report = build_report(runs, "Comparison of runs", late)
    page = save_report(report, out)
    tell = lambda text, style="": console.print(Text(visible(text), style=style))  # noqa: E731
    for line in late:
        tell(f"Warning: {line}", "yellow")
    console.print(to_rich(report.table, console.width))
    tell(report.verdict, "bold")
    tell(report.learning_rates)
    if report.unequal:
        tell("Not a like-for-like comparison:", "yellow")
        for line in report.unequal:
            tell(f"  {line}", "yellow")
    return page


def behind(run: Run) -> str | None:
    """A warning about a run whose newest checkpoint is newer than its log; None if its log is complete."""
    newest = max(steps_saved(run.path / CHECKPOINTS), default=0)
    if newest <= run.step:
        return None
    return (
        f"{run.path} has a checkpoint of step {newest}, and its log ends at step {run.step}: lines are missing, and "
        "what is compared here is not the end of the run."
    )
