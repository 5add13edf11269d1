"""Fixtures of several folders: a corpus and a run folder, as preparation and training leave them, and made-up runs."""

import json

import jax
import jax.numpy as jnp
import pytest

from nagjax.data import DataConfig, prepare
from nagjax.model.config import ModelConfig
from nagjax.residual.schemes.nag import NAG
from nagjax.runs.config import MeshConfig, RunConfig, TrainConfig, to_dict
from nagjax.train.checkpoint.store import Checkpoints
from nagjax.train.distributed.mesh import make_mesh
from nagjax.train.state import Blueprint
from tests.run_folders import write_run
from tests.tiny_models import shaken

STEP = 30  # of 1000: NAG's alpha has risen to 60% of its value


@pytest.fixture
def make_run(tmp_path):
    """Write a run folder of that name and return its path."""
    return lambda name, lines, **config: write_run(tmp_path / name, lines, **config)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A prepared folder of bytes; three of its documents are for validation."""
    folder = tmp_path_factory.mktemp("corpus")
    held_out = [folder / f"held-{i}.txt" for i in range(3)]
    for i, path in enumerate(held_out):
        path.write_text(f"document {i} is about the number {i}, é. " * (i + 2), encoding="utf-8")
    (folder / "train.txt").write_text("it was a dark and stormy night; " * 20)
    prepare([str(folder / "train.txt")], folder / "bytes", validation=0.0, held_out=list(map(str, held_out)))
    return folder / "bytes"


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, corpus):
    """A NAG run stopped at `STEP`, its parameters `shaken`."""
    folder = tmp_path_factory.mktemp("runs") / "nag"
    config = RunConfig(
        NAG(),
        ModelConfig(depth=2, width=32, heads=4, kv_heads=2, context=40),
        train=TrainConfig(steps=1000, batch=2),
        data=DataConfig(path=str(corpus)),
    )
    blueprint = Blueprint.of(config, make_mesh(MeshConfig(data=1), jax.local_devices()[:1]))
    state = blueprint.init(config.train.seed)
    state = state._replace(step=jnp.int32(STEP), params=shaken(state.params))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(STEP, state)
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    return folder
