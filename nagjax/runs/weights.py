"""The weights of a run, from one of its checkpoints."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from nagjax.layers.config import LoRAConfig
from nagjax.layers.lora import merged
from nagjax.runs.blueprint import ModelBlueprint, Tree
from nagjax.runs.config import RunConfig
from nagjax.runs.folder import read_config
from nagjax.runs.identity import owner, read_id
from nagjax.runs.names import CHECKPOINTS
from nagjax.train.checkpoint.store import check_newest, restore_parts


class Weights(NamedTuple):
    """Parameters of a model without adapters, its blueprint, the number of training steps done, and the state of
    Mixture-of-Depths."""

    blueprint: ModelBlueprint
    params: Tree
    step: int
    mod: dict


def read_weights(folder: Path, config: RunConfig, mesh: Mesh, step: int | None = None) -> Weights:
    """The weights of the run in `folder`, which has this config, on a mesh, after `step` steps (None: the newest). If
    the run keeps an average of its parameters, that is returned; adapters are merged into the matrices.

    Raises UserError if there is no checkpoint yet, none of this step or of this model, a damaged one, or another run's.
    """
    found = ModelBlueprint.of(config, mesh)
    state = restore_parts(folder / CHECKPOINTS, found.abstract_use(), owner(config, read_id(folder)), step)
    params, lora = state[found.weights], config.model.lora
    if lora.rank:
        config = without_adapters(config)
        found = ModelBlueprint.of(config, mesh)
        params = jax.jit(lambda p: merged(p, lora), out_shardings=found.parameter_shardings())(params)
    return Weights(found, params, int(state["step"]), state["mod"])


def check_weights(folder: Path) -> None:
    """Raises UserError where `read_weights` would: there is no run or no checkpoint yet, or it is damaged or another
    run's."""
    check_newest(folder / CHECKPOINTS, owner(read_config(folder), read_id(folder)))


def without_adapters(config: RunConfig) -> RunConfig:
    """The config of the model into which adapters are merged; nothing in it is frozen."""
    model = dataclasses.replace(config.model, lora=LoRAConfig())
    return dataclasses.replace(config, model=model, optimizer=dataclasses.replace(config.optimizer, freeze=()))
