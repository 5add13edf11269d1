"""The training loop: data in, steps, evaluations, metrics and checkpoints out; resumes by itself."""

import itertools
import json
import math
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nagjax.data import Dataset, batches, open_dataset
from nagjax.errors import UserError
from nagjax.train.checkpoint import Checkpoints
from nagjax.train.config import RunConfig, to_dict
from nagjax.train.console import ProgressLine
from nagjax.train.facts import resolve, run_facts
from nagjax.train.folder import prepare_folder, write_text
from nagjax.train.loss import Batch
from nagjax.train.mesh import batch_sharding, check_batch, make_mesh
from nagjax.train.metrics import Writers
from nagjax.train.state import Blueprint
from nagjax.train.step import jit_eval_step, jit_train_step
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


class Evaluator:
    """What a model makes of validation text: the run's own, unless `dataset` is given."""

    def __init__(self, blueprint: Blueprint, dataset: Dataset | None = None):
        self.blueprint = blueprint
        self.dataset = dataset or open_dataset(blueprint.config.data, split="validation")
        self.token_bytes = jnp.asarray(self.dataset.bytes_per_token())
        self.step = jit_eval_step(blueprint)

    def stream(self, limit: int | None = None) -> Iterator[Batch]:
        """The first `limit` (None: all) batches of one fixed order, on the devices."""
        size, context = self.blueprint.config.train.batch, self.blueprint.config.model.context
        stream = batches(self.dataset, batch=size, context=context, repeat=False, **process_share())
        return (put(self.blueprint, batch) for batch in itertools.islice(stream, limit))

    def __call__(self, params, step: int, stream: Iterable[Batch]) -> tuple[dict, dict]:
        """`loss` (nats per token), `bits_per_byte`, `accuracy`, `targets`; and telemetry, lists over sublayers."""
        results = []
        for batch in stream:
            results.append(self.step(params, jnp.int32(step), batch, self.token_bytes))
            results[-2:-1] = jax.device_get(results[-2:-1])  # one behind: neither waits for long, nor runs ahead
        results = jax.device_get(results)
        total = {name: float(sum(getattr(r.sums, name) for r in results)) for name in ("nats", "count", "correct")}
        read_bytes = float(sum(r.bytes for r in results))
        scores = {
            "loss": total["nats"] / total["count"],
            "bits_per_byte": total["nats"] / math.log(2) / read_bytes if read_bytes else None,
            "accuracy": total["correct"] / total["count"],
            "targets": int(total["count"]),
        }
        depth = {name: np.mean([r.depth[name] for r in results], axis=0) for name in results[0].depth}
        first = depth["log_norm"][:1] - depth["growth"][:1]
        depth["log_norm"] = np.concatenate([first, depth["log_norm"]])
        return scores, {name: [float(v) for v in values] for name, values in depth.items()}


def process_share() -> dict[str, int]:
    return {"process_index": jax.process_index(), "process_count": jax.process_count()}


def put(blueprint: Blueprint, batch: dict) -> Batch:
    """This process' rows of a batch as global arrays."""
    sharding = batch_sharding(blueprint.mesh)
    return Batch(**{k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()})


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
        scores, depth = evaluator(state.params, done, held_out)
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
