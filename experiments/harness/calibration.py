"""Calibration: whether a trained run's confidence equals its share of right predictions."""

from pathlib import Path
from typing import Any

from nagjax.measure.calibration import expected_calibration_error, reliability_on
from nagjax.report.curve import text_batches
from nagjax.runs.opening import open_run


def calibration_error(folder: Path) -> dict[str, Any]:
    """The expected calibration error on the validation text that the run's evaluations use."""
    run = open_run(folder, calibrated=False)
    text = text_batches(run, None, "validation", run.config.train.eval_batches)
    found = reliability_on(run.model, text, progress=run.progress)
    return {"calibration_error": round(float(expected_calibration_error(found)), 6)}
