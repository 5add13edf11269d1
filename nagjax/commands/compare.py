"""Compare runs side by side in one table and one report."""

from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL
from nagjax.console import note


def main(runs: Annotated[tuple[Path, ...], POSITIONAL], out: Path = Path("runs/compare")) -> None:
    """Compare two or more runs in one table, with loss curves and depth profiles.

    Args:
        runs: run folders, or names of the models that come with a clone of the repository.
        out: folder for report.html, report.md and the figures.
    """
    note(f"comparing {len(runs)} runs, into {out}")
    from nagjax.interop.hub import find_model
    from nagjax.report.compare import compare

    print(compare([find_model(run) for run in runs], out))
