"""Whether a trained run is as sure of its predictions as it is right."""

from pathlib import Path
from typing import Any

from nagjax.measure.calibration import expected_calibration_error, reliability_on
from nagjax.report.curve import text_batches
from nagjax.runs.opening import open_run


def calibration_error(folder: Path) -> dict[str, Any]:
    """The expected calibration error on the validation text of the run's evaluations."""
    run = open_run(folder, calibrated=False)
    text = text_batches(run, None, "validation", run.config.train.eval_batches)
    found = reliability_on(run.model, text, progress=run.progress)
    return {"calibration_error": round(float(expected_calibration_error(found)), 6)}
