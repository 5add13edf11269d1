"""The training loop: data in, steps, evaluations, metrics and checkpoints out; resumes by itself."""

import json
import signal
from pathlib import Path

import jax
from jax.sharding import Mesh

from nagjax.data import batches, open_dataset
from nagjax.errors import UserError
from nagjax.train.checkpoint import Checkpoints
from nagjax.train.config import RunConfig, to_dict
from nagjax.train.console import ProgressLine
from nagjax.train.evaluator import Evaluator, process_share, put
from nagjax.train.facts import resolve, run_facts
from nagjax.train.folder import prepare_folder, write_text
from nagjax.train.mesh import check_batch, make_mesh
from nagjax.train.metrics import Writers
from nagjax.train.state import Blueprint
from nagjax.train.step import jit_train_step
from nagjax.train.steplog import StepLog

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


class Stopper:
    """Turns the first SIGINT or SIGTERM into a flag, so that a run can save before it ends."""

    def __enter__(self):
        self.signal = None
        self._old = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, _):
        self.signal = number
        signal.signal(number, self._old[number])

    def __exit__(self, *_):
        for number, handler in self._old.items():
            signal.signal(number, handler)


def train(config: RunConfig, folder: Path, *, fresh: bool = False, label: str = "") -> Path:
    """Trains, or goes on training, the run in `folder` and returns it.

    Writes config.json, info.json, metrics.jsonl and checkpoints/. A finished run is left as it is. SIGINT and SIGTERM
    save and end it; the same call goes on where it stopped.

    Raises UserError for bad input (naming field, value and fix) and for a loss that is not finite.
    """
    folder = Path(folder)
    config = resolve(config)
    mesh = make_mesh(config.mesh)
    check_platform(config, mesh)
    check_batch(config.train.batch, config.train.accumulate, mesh)
    corpus = open_dataset(config.data)
    rows = batches(corpus, batch=config.train.batch, context=config.model.context, **process_share())
    data, blueprint = iter(rows), Blueprint.of(config, mesh)
    evaluator = Evaluator(
        blueprint
    )  # opens the validation text: what is wrong with data shows before anything is written
    prepare_folder(config, folder, corpus, fresh)
    with Checkpoints(folder / "checkpoints", config.train.keep) as checkpoints:
        resumed = checkpoints.latest
        if resumed is not None and resumed >= config.train.steps:
            return folder
        state = blueprint.create() if resumed is None else checkpoints.restore(blueprint.abstract(), data)
        facts = run_facts(blueprint)
        if jax.process_index() == 0:
            write_text(folder / "info.json", json.dumps(facts, indent=2))
        writers = Writers(folder, config.train.log, to_dict(config), resumed or 0)
        line = ProgressLine(label or config.scheme.title, config.train.steps, start=int(state.step))
        log = StepLog(writers, line, config.train.batch * config.model.context, facts)
        try:
            _run(blueprint, state, data, evaluator, checkpoints, writers, log)
        finally:
            writers.close()
    return folder


def _run(
    blueprint: Blueprint, state, data, evaluator: Evaluator, checkpoints: Checkpoints, writers: Writers, log: StepLog
) -> None:
    config = blueprint.config.train
    held_out = list(evaluator.stream(config.eval_batches))
    take_step = jit_train_step(blueprint)
    done = int(state.step)

    def evaluate() -> None:
        scores, depth = evaluator(state.params, state.mod, done, held_out)
        writers.write("eval", done, tokens=done * log.tokens_per_step, **scores)
        writers.write("depth", done, **depth)
        log.restart_clock()

    with Stopper() as stopper:
        if done == 0:
            evaluate()
        while done < config.steps and not stopper.signal:
            state, metrics = take_step(state, put(blueprint, next(data)))
            done += 1
            log.add(done, metrics)
            last = done == config.steps
            if last or done % config.eval_every == 0:
                log.flush()
                evaluate()
            if last or done % config.save_every == 0:
                log.flush()
                checkpoints.save(done, state, data)
                log.restart_clock()
        log.flush()
        if stopper.signal:
            checkpoints.save(done, state, data)
            raise KeyboardInterrupt
