"""Averages a run's checkpoints into a new run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from nagjax.errors import UserError
from nagjax.measure.cuts import Cutter
from nagjax.report.curve import finite, text_batches
from nagjax.report.derived import fresh_state, without_average, write_derived
from nagjax.runs.folder import read_config
from nagjax.runs.names import AVERAGED, CHECKPOINTS
from nagjax.runs.new_folder import new_folder
from nagjax.runs.opening import open_run
from nagjax.runs.weights import read_weights
from nagjax.train.checkpoint.store import steps_saved
from nagjax.train.state import Blueprint


def average(
    folder: str | Path,
    out: str | Path,
    *,
    newest: int | None = None,
    steps: Sequence[int] = (),
    batches: int = 8,
    data: str | None = None,
) -> dict:
    """Writes the mean of several checkpoints' weights to the new folder `out`, as a run like any other.

    The checkpoints are the `newest` ones or those of `steps`; if neither is given, all that the run has kept (`--keep`,
    `--keep-every`). Adapters are merged into the matrices before averaging, and a run with `--ema` contributes its
    moving averages. The thresholds of Mixture-of-Depths are those of the newest of the checkpoints.

    Returns a dict, which is also written to `average.json`: `source`, `steps`, `batches`, and `loss`, in nats per token
    on the first `batches` validation batches, with `newest` for the newest of these checkpoints alone and `average` for
    the result; None if not finite. Equation: Izmailov et al. 2018, arXiv:1803.05407, over one run's checkpoints
    (Kaddour 2022, arXiv:2209.14981).

    Raises UserError for whatever `open_run` does, for an `out` in use, for fewer than two checkpoints, and for a step
    without a checkpoint.
    """
    if newest is not None and steps:
        raise UserError("steps", list(steps), "give either --steps or --newest")
    folder = Path(folder)
    with new_folder(out, "average") as building:
        run = open_run(folder, calibrated=False)
        saved = sorted(steps_saved(folder / CHECKPOINTS))
        chosen = sorted(set(steps)) or saved[-newest if newest else None :]
        if len(saved) < max(newest or 0, 2):
            field, value = ("newest", newest) if newest else ("run", str(folder))
            fix = f"there are checkpoints of the steps {', '.join(map(str, saved))}: train with --keep or --keep-every"
            raise UserError(field, value, f"{fix} to have more to average")
        if len(chosen) < 2:
            raise UserError("newest" if newest else "steps", newest or chosen, "give at least 2 to average")
        config, mesh, mean = read_config(folder), run.blueprint.mesh, None
        for count, step in enumerate(chosen, 1):
            found = run if step == run.step else read_weights(folder, config, mesh, step)
            mean = found.params if mean is None else _towards(mean, found.params, count)
        last = dataclasses.replace(run, step=found.step, params=found.params, mod=found.mod)
        held_out = text_batches(run, data, "validation", batches)
        blueprint = Blueprint.of(without_average(run.config), mesh)
        if not config.model.lora.rank:  # no scheme constrains matrices into which adapters were merged
            mean = blueprint.with_trained(mean, blueprint.constrained(blueprint.trained(mean)))
        made = dataclasses.replace(last, blueprint=blueprint, params=mean)
        loss = {name: finite(Cutter(own).loss(held_out)) for name, own in (("newest", last), ("average", made))}
        record = {"source": str(folder), "steps": chosen, "loss": loss, "batches": len(held_out)}
        write_derived(made, fresh_state(made), building, folder, {AVERAGED: record}, loss["average"])
    return record


@jax.jit
def _towards(mean, one, count):
    return jax.tree.map(lambda old, new: old + (new - old) / count, mean, one)
