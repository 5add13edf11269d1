"""What a whole run asks of compiler and memory: two programs, none after the second step, and no second copy of the
state."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import monitoring

from nagjax.generate.evaluate import evaluate
from nagjax.mod.config import ModConfig
from nagjax.residual import find_scheme
from nagjax.runs.opening import open_run
from nagjax.train import loop as loop_module
from nagjax.train.abstract_step import abstract_batch
from nagjax.train.batches import TrainBatches
from nagjax.train.checkpoint.store import Checkpoints
from nagjax.train.distributed.mesh import batch_sharding
from nagjax.train.loop import train
from nagjax.train.step import jit_train_step
from tests import tiny

COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compiled(programs: list):
    """Adds an entry to `programs` for each program that XLA compiles meanwhile."""
    listener = lambda event, seconds, **_: programs.append(event) if event == COMPILED else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield
    finally:
        monitoring.unregister_event_duration_listener(listener)


def test_nothing_is_compiled_after_the_second_step(run_of, tmp_path, monkeypatch):
    """Evaluations, saves, a rollback and all: what the first two steps and the first evaluation compile is enough."""
    make, take, programs = loop_module.jit_train_step, TrainBatches.take, []
    steps = []

    def watched(blueprint):
        step = make(blueprint)

        def counted(*args):
            steps.append(len(programs))
            return step(*args)

        return counted

    def poisoned(self, number):
        batch = dict(take(self, number))
        return batch | {"weights": batch["weights"] * np.float32(np.nan if number == 4 else 1.0)}

    monkeypatch.setattr(loop_module, "jit_train_step", watched)
    monkeypatch.setattr(TrainBatches, "take", poisoned)
    with compiled(programs):
        train(run_of(on_bad_step="rollback"), tmp_path / "run")
    assert len(steps) >= 8 and len(set(steps[2:])) == 1, steps
    assert len(programs) == steps[-1], "the last evaluation and save compiled something"


def test_an_open_run_is_evaluated_again_by_the_same_program(run_of, tmp_path):
    train(run_of(), tmp_path / "run")
    run, programs = open_run(tmp_path / "run"), []
    first = evaluate(run, batches=1)
    with compiled(programs):
        again = evaluate(run, batches=1)
    assert not programs and again == first


def test_a_save_compiles_nothing_for_the_devices_that_hold_copies(tmp_path):
    blueprint = tiny.blueprint(tiny.run_config(find_scheme("nag")()), data=8)
    state, programs = blueprint.create(), []
    with compiled(programs), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        checkpoints.wait()
    assert not programs
    restored = Checkpoints(tmp_path).restore(blueprint.abstract())
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(state))


@pytest.mark.parametrize("mod", [ModConfig(), ModConfig(rate=(0.5,))], ids=["dense", "routed"])
def test_the_state_is_donated_whole(mod):
    """The new state lies where the old one was, guard and all: the step needs no room for a second one."""
    blueprint = tiny.blueprint(tiny.run_config(find_scheme("nag")(), mod=mod))
    step, state = jit_train_step(blueprint), blueprint.create()
    batch = jax.device_put(tiny.packed_batch(), batch_sharding(blueprint.mesh))
    memory = step.lower(state, batch).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= size
    new, _ = step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new)) and jnp.isfinite(new.guard.losses[-1])


def test_one_block_more_costs_its_parameters_and_the_stream_that_enters_it():
    """The rest of the step's memory does not grow with depth, though a block's own activations are ten times this."""
    temporary, context = {}, 64
    for depth in (4, 8):
        config = tiny.run_config(find_scheme("nag")(), depth=depth, remat="block", context=context)
        blueprint = tiny.blueprint(config)
        state = blueprint.abstract()
        compiled = jit_train_step(blueprint).lower(state, abstract_batch(blueprint)).compile()
        temporary[depth] = compiled.memory_analysis().temp_size_in_bytes
    parameters = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params["blocks"])) / 8
    stream = tiny.BATCH * context * (config.model.width + 1) * 4  # direction and log-norm
    grown = (temporary[8] - temporary[4]) / 4
    assert stream < grown < 1.1 * (stream + 2 * parameters), "gradients, and their update"
