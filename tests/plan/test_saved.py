"""What the scan keeps for the backward pass, by policy."""

import dataclasses

import jax
import pytest

from nagjax.layers.config import MoEConfig
from nagjax.model.config import ModelConfig
from nagjax.plan.worker import _bytes, _saved
from nagjax.residual import find_scheme
from nagjax.runs.config import MeshConfig, RunConfig, TrainConfig
from nagjax.train.abstract_step import training_step

MODEL = ModelConfig(6, 32, context=16, vocab=31, dtype="float32", attention="xla", remat="block", kernels="xla")
CONFIG = RunConfig(find_scheme("plain")(), MODEL, train=TrainConfig(batch=8), mesh=MeshConfig(fsdp=2))


def saved(config):
    step, args, mesh = training_step(config, jax.devices()[:8])
    with jax.set_mesh(mesh):
        return _saved(config, step.trace(*args), mesh)


def test_whole_blocks_keep_the_stream_alone():
    # Plain carries the stream and its normalised copy.
    rows = 8 * 16 // 8
    assert saved(CONFIG) == 6 * rows * 32 * 4 * 2


def test_policies_are_ordered_and_parts_divide():
    by_policy = [
        saved(dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, remat=remat)))
        for remat in ("block", "dots", "none")
    ]
    assert by_policy[0] < by_policy[1] < by_policy[2]
    batch = dataclasses.replace(CONFIG, train=TrainConfig(batch=16))
    halves = dataclasses.replace(CONFIG, train=TrainConfig(batch=16, accumulate=2))
    assert saved(halves) == saved(CONFIG) == pytest.approx(saved(batch) / 2)


@pytest.mark.parametrize("part", [{}, {"moe": MoEConfig(experts=4)}], ids=["dense", "experts"])
def test_a_batch_that_is_split_is_split_whatever_the_axis_is_called(part):
    """Scores of attention and rows of experts, too, where the batch is not the first dimension of a block's array."""
    model = dataclasses.replace(MODEL, remat="none", **part)
    config = dataclasses.replace(CONFIG, model=model)
    by_axis = [saved(dataclasses.replace(config, mesh=MeshConfig(**{axis: 8}))) for axis in ("data", "fsdp")]
    assert by_axis[0] == pytest.approx(by_axis[1], rel=0.01)  # gains of norms are the parameters'


def test_bytes_are_those_of_one_device():
    _, (state, batch), _ = training_step(CONFIG, jax.devices()[:8])
    assert _bytes(batch) == 5 * 8 * 16 * 4 / 8
    whole = sum(x.size * 4 for x in jax.tree.leaves(state.params))
    assert whole / 2 <= _bytes(state.params) < 0.6 * whole  # vectors are not split
