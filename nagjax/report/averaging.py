"""The average of a run's checkpoints, as a run of its own."""

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
    """Writes the mean of some checkpoints' weights to the new folder `out`, a run like any.

    They are the `newest` ones, or those of `steps`; all that the run keeps (`--keep`, `--keep-every`) unless either is
    given. Matrices of a run with adapters are averaged merged, and of a run with `--ema` its averages. Thresholds of
    Mixture-of-Depths are the newest checkpoint's.

    Returns, as is written to `average.json`, the steps and the losses on the first `batches` validation batches, nats
    per token: `newest`, of the newest of these checkpoints alone, and `average`; None is not finite. Equation: Izmailov
    et al. 2018, arXiv:1803.05407, over one run's checkpoints (Kaddour 2022, arXiv:2209.14981).

    Raises UserError: all that `open_run` raises, an `out` that is in use, fewer than two checkpoints, one that is not
    there.
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
        if not config.model.lora.rank:  # merged matrices are as adapters made them: no scheme constrains those
            mean = blueprint.with_trained(mean, blueprint.constrained(blueprint.trained(mean)))
        made = dataclasses.replace(last, blueprint=blueprint, params=mean)
        loss = {name: finite(Cutter(own).loss(held_out)) for name, own in (("newest", last), ("average", made))}
        record = {"source": str(folder), "steps": chosen, "loss": loss, "batches": len(held_out)}
        write_derived(made, fresh_state(made), building, folder, {AVERAGED: record}, loss["average"])
    return record


@jax.jit
def _towards(mean, one, count):
    return jax.tree.map(lambda old, new: old + (new - old) / count, mean, one)
