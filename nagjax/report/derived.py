"""Writes a run that was made from another run's weights without training."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from nagjax.files import copy, has_file, write_json
from nagjax.runs.config import RunConfig
from nagjax.runs.facts import run_facts
from nagjax.runs.identity import found_run
from nagjax.runs.names import CHECKPOINTS, CORPUS, INFO, ORIGIN, TOKENIZER_FILES
from nagjax.runs.opening import OpenRun
from nagjax.train.checkpoint.store import Checkpoints
from nagjax.train.safety.guard import new_guard
from nagjax.train.state import Blueprint, TrainState

COPIED = (CORPUS, ORIGIN, *TOKENIZER_FILES)


def without_average(config: RunConfig) -> RunConfig:
    """The config without a moving average of the weights: the new weights have none yet."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, ema=0.0))


def fresh_state(run: OpenRun) -> TrainState:
    """A state from which training can continue, with fresh moments; training then starts with a warm-up."""
    key = jax.random.key_data(jax.random.key(run.config.train.seed))
    blueprint = Blueprint.of(run.config, run.blueprint.mesh)
    moments = blueprint.optimizer.init(blueprint.trained(run.params))
    return TrainState(jnp.int32(run.step), run.params, moments, key, run.mod, new_guard())


def write_derived(
    run: OpenRun, state: TrainState, out: Path, source: Path, records: dict[str, dict], loss: float | None
) -> None:
    """Writes the files of a run into an empty folder, with the tokenizer's files of its source. `records`: further
    files by name, which say how the run was made. `loss`: on validation text, in nats per token, as training scores it
    (for a routed model by its causal decider); None if not finite."""
    for name in COPIED:
        if has_file(source / name):
            copy(source / name, out / name)
    for name, content in ({INFO: run_facts(run.blueprint)} | records).items():
        write_json(out / name, content)
    with Checkpoints(out / CHECKPOINTS, found_run(out, run.config)) as checkpoints:
        checkpoints.save(run.step, state, {"score": loss, "evaluated": True})
