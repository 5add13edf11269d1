"""The training loop: data in, steps, evaluations, metrics and checkpoints out; resumes by itself."""

import json
from contextlib import closing
from pathlib import Path

import jax
from jax.sharding import Mesh

from nagjax.data import Dataset, open_dataset
from nagjax.errors import UserError
from nagjax.runs.config import RunConfig, to_dict
from nagjax.runs.folder import prepare_folder, write_text
from nagjax.train.batches import Skipped, TrainStream
from nagjax.train.checkpoint.store import Checkpoints
from nagjax.train.distributed.consensus import from_first, together
from nagjax.train.distributed.mesh import batch_share, check_batch, make_mesh
from nagjax.train.evaluator import Evaluator
from nagjax.train.facts import resolve, run_facts
from nagjax.train.logging.console import ProgressLine
from nagjax.train.logging.metrics import Writers
from nagjax.train.logging.steplog import StepLog
from nagjax.train.run import Run
from nagjax.train.safety.stop import Stopper
from nagjax.train.safety.watchdog import Watchdog
from nagjax.train.state import Blueprint

PLATFORM_OF = {
    "kernels": {"mosaic_tpu": "tpu", "pallas_triton": "gpu", "triton": "gpu"},
    "attention": {"splash": "tpu", "cudnn": "gpu"},
}


def check_platform(config: RunConfig, mesh: Mesh) -> None:
    """Raises UserError for an implementation that was forced and does not run on the mesh's devices."""
    there = mesh.devices.flat[0].platform
    for field, platforms in PLATFORM_OF.items():
        value = getattr(config.model, field)
        needed = platforms.get(value, there)
        if needed != there:
            raise UserError(field, value, f"runs on {needed} only, and this is {there}; use auto or xla")


def _open(config: RunConfig) -> tuple[Blueprint, Dataset, TrainStream, Evaluator]:
    """Everything that is read: what is wrong with it shows before anything is written."""
    config = resolve(config)
    mesh = make_mesh(config.mesh)
    check_platform(config, mesh)
    check_batch(config.train.batch, config.train.accumulate, mesh)
    corpus, share = open_dataset(config.data), batch_share(mesh)
    stream = TrainStream(corpus, config.train.batch, config.model.context, **share)
    blueprint = Blueprint.of(config, mesh)
    return blueprint, corpus, stream, Evaluator(blueprint)


def train(config: RunConfig, folder: Path, *, fresh: bool = False, label: str = "", skip_damaged: bool = False) -> Path:
    """Trains, or goes on training, the run in `folder` and returns it.

    Writes config.json, info.json, metrics.jsonl and checkpoints/. A finished run is left as it is. SIGINT and SIGTERM
    save and end it; the same call goes on where it stopped, and ends with the same parameters, optimizer state and
    metrics (`metrics.comparable`) as if it had never stopped, to the bit, however it stopped.

    A newest checkpoint that is damaged is an error, or, with `skip_damaged`, named, put aside and passed over.

    In a run of several processes every one calls this; they share `folder`, and the first one writes the metrics.

    Raises UserError for bad input (naming field, value and fix), for a save that failed, and for bad steps as
    `config.train.on_bad_step` has it; KeyboardInterrupt after SIGINT, Preempted (exit code 0) after SIGTERM.
    """
    folder = Path(folder)
    blueprint, corpus, stream, evaluator = together(lambda: _open(config))
    config, options = blueprint.config, blueprint.config.train
    prepare_folder(config, folder, corpus, fresh)
    policy = {"latest": options.keep, "best": options.keep_best, "every": options.keep_every}
    with (
        closing(stream),
        Stopper() as stopper,
        Checkpoints(folder / "checkpoints", **policy) as checkpoints,
        closing(Watchdog()) as watchdog,
    ):
        resumed = checkpoints.newest(skip_damaged)
        owed = resumed is None or not checkpoints.facts(resumed).get("evaluated", True)
        if resumed is not None and resumed >= options.steps and not owed:
            return folder
        facts = run_facts(blueprint)
        from_first(lambda: write_text(folder / "info.json", json.dumps(facts, indent=2)))
        skipped = Skipped(folder, fresh=resumed is None)
        title, quiet = label or config.scheme.title, jax.process_index() > 0
        line = ProgressLine(title, options.steps, start=resumed or 0, quiet=quiet)
        with closing(together(lambda: Writers(folder, options.log, to_dict(config), resumed or 0, owed))) as writers:
            log = StepLog(writers, line, options.batch * config.model.context, facts, watchdog)
            if resumed is not None:
                writers.write("event", resumed, message="resumed")
            Run(blueprint, stream, skipped, evaluator, checkpoints, writers, log, stopper).go(resumed)
    return folder
