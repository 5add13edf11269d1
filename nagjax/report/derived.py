"""A run that was made from another's weights, without a training of its own."""

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
    """A config whose runs keep no average of their weights: there is none yet of what is new."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, ema=0.0))


def fresh_state(run: OpenRun) -> TrainState:
    """A state to train on from, with fresh moments; a warm-up starts with it."""
    key = jax.random.key_data(jax.random.key(run.config.train.seed))
    blueprint = Blueprint.of(run.config, run.blueprint.mesh)
    moments = blueprint.optimizer.init(blueprint.trained(run.params))
    return TrainState(jnp.int32(run.step), run.params, moments, key, run.mod, new_guard())


def write_derived(
    run: OpenRun, state: TrainState, out: Path, source: Path, records: dict[str, dict], loss: float | None
) -> None:
    """The files of a run in an empty folder, with those of its source's tokenizer. `records`: further files, by name,
    that say what was made of what; `loss`: on validation text, nats per token, as training scores it (of a routed model
    by its causal decider); None is not finite."""
    for name in COPIED:
        if has_file(source / name):
            copy(source / name, out / name)
    for name, content in ({INFO: run_facts(run.blueprint)} | records).items():
        write_json(out / name, content)
    with Checkpoints(out / CHECKPOINTS, found_run(out, run.config)) as checkpoints:
        checkpoints.save(run.step, state, {"score": loss, "evaluated": True})
