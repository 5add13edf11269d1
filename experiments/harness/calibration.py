"""Whether a trained run is as sure of its predictions as it is right."""

from pathlib import Path
from typing import Any

import jax
from flax import nnx

from nagjax.measure.calibration import expected_calibration_error, reliability_on
from nagjax.report.curve import text_batches
from nagjax.runs.opening import open_run


def calibration_error(folder: Path) -> dict[str, Any]:
    """The expected calibration error on the validation text of the run's evaluations."""
    run = open_run(folder, calibrated=False)
    graph, params = nnx.split(run.model)
    on = jax.jit(lambda params, batch: reliability_on(nnx.merge(graph, params), batch, progress=run.progress))
    text = text_batches(run, None, "validation", run.config.train.eval_batches)
    found = expected_calibration_error(sum(on(params, batch) for batch in text))
    return {"calibration_error": round(float(found), 6)}
