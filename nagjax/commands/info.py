"""Parameters, FLOPs and memory of a run or a model."""

from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL, Given
from nagjax.errors import UserError
from nagjax.options import RunOptions


def main(options: RunOptions, given: Given, run: Annotated[Path | None, POSITIONAL] = None) -> None:
    """Parameters by part, FLOPs and memory of a run (nagjax info RUN), or of any model (nagjax info --depth 96 ...).

    Args:
        run: a run folder.
    """
    if run is not None and given - {"run"}:
        named = ", ".join(sorted(given - {"run"}))
        raise UserError("info", named, "a run has all its options already: give its folder alone")
    from rich.console import Console

    from nagjax.runs.opening import read_config
    from nagjax.train.facts import describe, resolve

    Console().print(describe(resolve(options.config()) if run is None else read_config(run)))
