"""The average of the weights: what it is, and where it is kept. A run with one resumes in `test_mixture_run.py`."""

import dataclasses

import jax
import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.generate.evaluate import evaluate
from nagjax.residual import find_scheme
from nagjax.runs import names
from nagjax.runs.config import TrainConfig
from nagjax.runs.log import load_run
from nagjax.runs.opening import open_run
from nagjax.train.checkpoint.store import restore_parts
from nagjax.train.distributed.mesh import batch_sharding
from nagjax.train.facts import state_bytes
from nagjax.train.loop import train
from nagjax.train.setup import set_up
from nagjax.train.step import jit_train_step
from nagjax.train.warm_start import begin
from tests import tiny
from tests.tolerance import assert_close

DECAY = 0.5


def test_the_average_is_that_of_good_steps():
    """On eight devices; recomputed in float64 from the parameters of each step; a bad step, the third one, changes
    nothing."""
    bp = tiny.blueprint(tiny.run_config(find_scheme("plain")(), train={"ema": DECAY}, depth=1), 2, 2, 2)
    state, step = bp.create(), jit_train_step(bp)
    want = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(state.params))
    good = 0
    for seed in range(5):
        batch = tiny.packed_batch(seed)
        if seed == 2:
            batch = batch._replace(weights=batch.weights * np.float32(np.nan))
        state, metrics = step(state, jax.device_put(batch, batch_sharding(bp.mesh)))
        assert bool(metrics.bad) == (seed == 2)
        if not metrics.bad:
            kept = min(DECAY, (1 + good) / (10 + good))
            want = jax.tree.map(lambda old, new, k=kept: k * old + (1 - k) * new, want, jax.device_get(state.params))
            good += 1
    assert_close(jax.device_get(state.average), want, terms=1, chain=5)
    up = state.params["blocks"]["mlp"]["branch"]["up"]
    assert state.average["blocks"]["mlp"]["branch"]["up"].sharding == up.sharding
    assert not np.allclose(state.average["head"]["tokens"], state.params["head"]["tokens"], rtol=1e-3)


def test_the_average_is_where_the_scheme_puts_its_matrices():
    """nGPT's have unit rows or columns after every step: the mean of such is shorter, and would be another model."""
    bp = tiny.blueprint(tiny.run_config(find_scheme("ngpt")(), train={"ema": 0.9}, optimizer={"lr": 0.1}, depth=1))
    state, step = tiny.fresh(bp), jit_train_step(bp)
    for seed in range(4):
        state, _ = step(state, tiny.packed_batch(seed))
    assert_close(state.average, bp.constrained(state.average), terms=64, chain=4)
    assert not np.allclose(state.average["head"]["tokens"], state.params["head"]["tokens"], rtol=1e-3)


def test_without_one_the_state_is_as_it_was():
    plain, averaged = (tiny.blueprint(tiny.run_config(find_scheme("plain")(), train={"ema": e})) for e in (0.0, DECAY))
    assert plain.abstract().average == {}
    few, more = (state_bytes(bp) for bp in (plain, averaged))
    assert more["optimizer"] == few["optimizer"] + few["parameters"]


@pytest.mark.parametrize("wrong", [1.0, -0.1, float("nan")])
def test_decays(wrong):
    with pytest.raises(UserError) as error:
        TrainConfig(ema=wrong)
    assert error.value.field == "ema"


@pytest.fixture(scope="module")
def whole(run_of, tmp_path_factory):
    return train(run_of(ema=DECAY), tmp_path_factory.mktemp("ema") / "whole")


def test_what_is_opened_is_the_average(whole, run_of):
    """Its loss is that of the run's own last evaluation, and a run that starts from it begins with it; the parameters
    of the last step are others."""
    run = open_run(whole)
    abstract = {"params": run.blueprint.abstract_params(), "average": run.blueprint.abstract_params()}
    saved = restore_parts(whole / names.CHECKPOINTS, abstract)
    for got, average, last in zip(*map(jax.tree.leaves, (run.params, saved["average"], saved["params"])), strict=True):
        np.testing.assert_array_equal(got, average)
        assert not np.array_equal(got, last)
    logged = load_run(whole)
    assert evaluate(whole, batches=1)["loss"] == pytest.approx(logged.last_eval.loss, rel=1e-5)
    blueprint = set_up(dataclasses.replace(run_of(), start=str(whole))).blueprint
    begun = begin(blueprint)
    assert blueprint.config.train.ema == 0.0 and begun.average == {}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(begun.params), jax.device_get(run.params))
