"""Show parameters, FLOPs and memory of a run or a model."""

from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL, Given
from nagjax.console import note
from nagjax.options import RunOptions


def main(
    options: RunOptions, given: Given, run: Annotated[Path | None, POSITIONAL] = None, kernels: bool = False
) -> None:
    """Show parameters by part, FLOPs and memory of a run (nagjax info RUN) or any model (nagjax info --depth 96 ...).

    Args:
        run: a run folder, or a model that nagjax import reads.
        kernels: show instead, for every platform, which implementation each fused operation uses at the model's width,
            and why others cannot be used.
    """
    if run is not None:
        given.refuse(
            sorted(given.keys() - {"run", "kernels"}), "a run already has all its options: give only its folder"
        )
    note(f"reading {run}" if run else f"describing {options}")
    from rich.console import Console

    from nagjax.interop.hub import find_model
    from nagjax.interop.load import config_of
    from nagjax.runs.names import CHECKPOINTS
    from nagjax.runs.opening import read_calibration
    from nagjax.train.checkpoint.store import steps_saved
    from nagjax.train.facts import describe, resolve

    config = resolve(options.config()) if run is None else config_of(run)
    if kernels:
        from pallas_kernels.implementations import table

        print(table(width=config.model.width, dtype=config.model.dtype.replace("auto", "bfloat16")))
    else:
        folder = find_model(run) if run else None
        point = read_calibration(folder) if folder else None
        Console().print(describe(config))
        if folder and point:
            told = f"It is opened at the calibrated rate {point.rate:g}."
            if point.step not in (None, newest := max(steps_saved(folder / CHECKPOINTS), default=point.step)):
                told = f"It was calibrated at step {point.step} and is at step {newest}: calibrate it again."
            print(f"These are the figures of the dense model. {told}")
