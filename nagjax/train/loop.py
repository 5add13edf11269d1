"""The training loop: data in, steps, evaluations, metrics and checkpoints out; resumes by itself."""

import json
from contextlib import closing
from pathlib import Path

import jax
from jax.sharding import Mesh

from nagjax.data import open_dataset
from nagjax.errors import UserError
from nagjax.train.checkpoint import Checkpoints
from nagjax.train.config import RunConfig, to_dict
from nagjax.train.console import ProgressLine
from nagjax.train.evaluator import Evaluator, process_share
from nagjax.train.facts import resolve, run_facts
from nagjax.train.folder import prepare_folder, write_text
from nagjax.train.mesh import check_batch, make_mesh
from nagjax.train.metrics import Writers
from nagjax.train.run import Run
from nagjax.train.state import Blueprint
from nagjax.train.steplog import StepLog
from nagjax.train.stop import Stopper
from nagjax.train.stream import Skipped, TrainStream
from nagjax.train.watchdog import Watchdog

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


def train(config: RunConfig, folder: Path, *, fresh: bool = False, label: str = "", skip_damaged: bool = False) -> Path:
    """Trains, or goes on training, the run in `folder` and returns it.

    Writes config.json, info.json, metrics.jsonl and checkpoints/. A finished run is left as it is. SIGINT and SIGTERM
    save and end it; the same call goes on where it stopped, and ends with the same parameters, optimizer state and
    metrics (`metrics.comparable`) as if it had never stopped, to the bit, however it stopped.

    A newest checkpoint that is damaged is an error, or, with `skip_damaged`, named, put aside and passed over.

    Raises UserError for bad input (naming field, value and fix), for a save that failed, and for bad steps as
    `config.train.on_bad_step` has it; KeyboardInterrupt after SIGINT, Preempted (exit code 0) after SIGTERM.
    """
    folder = Path(folder)
    config = resolve(config)
    mesh = make_mesh(config.mesh)
    check_platform(config, mesh)
    check_batch(config.train.batch, config.train.accumulate, mesh)
    options, corpus = config.train, open_dataset(config.data)
    stream = TrainStream(corpus, options.batch, config.model.context, **process_share())
    blueprint = Blueprint.of(config, mesh)
    evaluator = Evaluator(blueprint)  # opens the validation text: bad data shows before anything is written
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
        if jax.process_index() == 0:
            write_text(folder / "info.json", json.dumps(facts, indent=2))
        skipped = Skipped(folder, fresh=resumed is None)
        line = ProgressLine(label or config.scheme.title, options.steps, start=resumed or 0)
        with closing(Writers(folder, options.log, to_dict(config), resumed or 0, owed)) as writers:
            log = StepLog(writers, line, options.batch * config.model.context, facts, watchdog)
            if resumed is not None:
                writers.write("event", resumed, message="resumed")
            Run(blueprint, stream, skipped, evaluator, checkpoints, writers, log, stopper).go(resumed)
    return folder
