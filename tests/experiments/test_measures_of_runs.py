"""What an experiment measures of a run that is done, the other way."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest

from experiments.harness.calibration import calibration_error
from experiments.harness.gradients import gradients
from nagjax.data import DataConfig
from nagjax.measure.calibration import expected_calibration_error, reliability_on
from nagjax.report.curve import text_batches
from nagjax.residual import find_scheme
from nagjax.runs.config import to_dict
from nagjax.runs.names import CONFIG
from nagjax.runs.opening import open_run
from nagjax.train.checkpoint.store import Checkpoints
from nagjax.train.loss import cross_entropy
from tests import tiny
from tests.run_fixtures import corpus  # noqa: F401
from tests.tolerance import close_to

STEP = {"terms": 257, "chain": 64}


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):  # noqa: F811
    """Two ordinary blocks, stopped in the middle of a training that has moved their parameters anyhow."""
    train = {"batch": 2, "eval_batches": 3}
    config = tiny.run_config(find_scheme("plain")(), train=train, depth=2, vocab=257, context=16)
    plan = tiny.blueprint(dataclasses.replace(config, data=DataConfig(str(corpus))))
    state, folder = tiny.fresh(plan), tmp_path_factory.mktemp("runs") / "plain"
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(30, state._replace(step=jnp.int32(30), params=tiny.moved(state.params, 0.5)))
    (folder / CONFIG).write_text(json.dumps(to_dict(plan.config)))
    return open_run(folder)


def test_a_calibration_error_is_of_validation_text(run):
    errors = []
    for split in ("validation", "train"):
        text = text_batches(run, None, split, run.config.train.eval_batches)
        errors.append(float(expected_calibration_error(reliability_on(run.model, text, progress=run.progress))))
    assert calibration_error(run.folder) == {"calibration_error": round(errors[0], 6)}
    assert abs(errors[0] - errors[1]) > 1e-3


def test_gradients_are_of_the_first_and_of_the_last_block_at_the_start_and_at_the_end(run):
    """Of the branches alone, without what the scheme has in a block."""
    (batch,) = text_batches(run, None, "validation", 1)

    @jax.jit
    def gradient(params):
        def loss(params):
            model = run.blueprint.model(params)
            sums = cross_entropy(model.logits(model(batch.tokens, batch.where, progress=1.0)), batch)
            return sums.nats / sums.count

        return jax.grad(loss)(params)["blocks"]

    want = {}
    for when, params in (("start", run.blueprint.create_params()), ("end", run.params)):
        branches = [own["branch"] for own in gradient(params).values() if "branch" in own]
        for which, block in (("first", 0), ("last", run.config.model.depth - 1)):
            norm = optax.tree.norm(jax.tree.map(lambda leaf, i=block: leaf[i], branches))
            want[f"{which}_gradient_{when}"] = close_to(float(norm), **STEP)
    assert gradients(run.folder) == want
