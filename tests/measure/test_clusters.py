"""Groups of tokens by the turns that blocks give them."""

import numpy as np
import pytest

from experiments.harness.jobs import Record
from experiments.harness.turning import columns, grouped
from nagjax.data import load_tokenizer
from nagjax.errors import UserError
from nagjax.measure.angles import angle
from nagjax.measure.clusters import clusters, explained_variance
from nagjax.measure.interventions import residual, through
from nagjax.residual import find_scheme
from nagjax.runs.opening import OpenRun
from tests import tiny
from tests.tolerance import assert_close


def planted(counts=(300, 30), blocks=12, noise=0.02):
    """Tokens turned alike in the middle, and few that are turned early only; shuffled, with their groups."""
    random = np.random.default_rng(0)
    centres = np.full((2, blocks), 0.1)
    centres[1, 3:], centres[1, :3] = 0.0, 0.8
    group = random.permutation(np.repeat([0, 1], counts))
    return centres[group] + noise * random.standard_normal((len(group), blocks)), group, centres


def test_planted_groups_are_found():
    turns, group, centres = planted()
    found = clusters(turns, 2)
    np.testing.assert_array_equal(found.labels, group)
    np.testing.assert_allclose(found.centres, centres, atol=0.02)
    np.testing.assert_allclose(found.shares, [300 / 330, 30 / 330])
    assert found.explained[0] > 0.9 > 0.05 > found.explained[1]
    again = clusters(turns, 2)
    np.testing.assert_array_equal(found.labels, again.labels)
    turned = clusters(turns[::-1], 3, seed=5)
    assert turned.centres.shape == (3, 12) and np.all(np.diff(turned.shares) <= 0)
    np.testing.assert_allclose(turned.shares.sum(), 1)


def test_explained_variance_is_that_of_the_covariance():
    turns = np.random.default_rng(1).standard_normal((50, 4)) * [1.0, 2.0, 3.0, 0.5]
    values = np.linalg.eigvalsh(np.cov(turns.T))[::-1]
    np.testing.assert_allclose(explained_variance(turns, 3), (values / values.sum())[:3])
    assert not explained_variance(np.ones((5, 3))).any()


@pytest.mark.parametrize(
    "field, turns, given",
    [
        ("k", np.eye(3), {"k": 4}),
        ("k", np.ones((9, 2)), {"k": 2}),
        ("k", np.eye(3), {"k": 0}),
        ("starts", np.eye(3), {"starts": 0}),
        ("seed", np.eye(3), {"seed": -1}),
        ("turns", np.full((3, 2), np.nan), {}),
        ("turns", np.ones(3), {}),
    ],
)
def test_what_has_no_groups_is_refused(field, turns, given):
    with pytest.raises(UserError) as error:
        clusters(turns, **given)
    assert error.value.field == field


def test_the_groups_of_a_model_s_tokens():
    plan = tiny.blueprint(tiny.run_config(find_scheme("nag")()))
    run = OpenRun("run", plan, 100, tiny.moved(tiny.fresh(plan).params, 0.3), {}, load_tokenizer("bytes"))
    batches = [tiny.packed_batch(seed) for seed in (0, 1)]
    found = grouped(run, batches)

    def watch(model, stream, call):
        after = through(model, stream, call)
        return after, (residual(model.scheme, stream), residual(model.scheme, after))

    turns = []
    for batch in batches:
        before, after = run.model(batch.tokens, batch.where, progress=run.progress, intervene=watch).seen
        turns.append(np.asarray(angle(before, after))[:, batch.weights > 0])
    mean = np.mean(np.concatenate(turns, axis=1), axis=1)
    counts = np.array([batch.weights.sum() for batch in batches])
    assert found["tokens"] == counts.sum() and found["shares"][0] >= 0.5
    assert_close(np.array(found["shares"]) @ found["centres"], mean, **tiny.FORWARD, scale=1.0)
    first = sum(np.sum((batch.positions == 0) & (batch.weights > 0)) for batch in batches)
    np.testing.assert_allclose(np.dot(found["shares"], found["first"]), first / counts.sum(), atol=1e-5)
    np.testing.assert_allclose(np.sum(found["of_first"]), 1, atol=1e-5)
    cells = columns([Record("", {}, {}, {"groups": found})])
    assert cells["groups of tokens"].count("%") == 2 and not any(columns([Record("", {}, {}, {})]).values())
