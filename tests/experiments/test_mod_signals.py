"""Signals of what to skip: gains against differences, the pass against the library's own, and what is read off."""

import jax
import numpy as np
import pytest

from experiments.harness.jobs import Record
from experiments.harness.signals import Seen, Signals
from experiments.harness.skipping import Point, Skipping
from experiments.mod_signals import READ, SIZES, WAYS, added, gaps, plan, summarise
from nagjax.measure.cuts import Cutter
from nagjax.residual import find_scheme
from nagjax.runs.facts import model_costs
from nagjax.runs.opening import OpenRun
from tests import tiny
from tests.tolerance import close_to

SHAPE = 2, 2, 2, 16  # blocks, sublayers, sequences, tokens


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    blueprint = tiny.blueprint(tiny.run_config(find_scheme("nag")(), depth=2, context=16))
    params = tiny.moved(jax.jit(lambda: blueprint.init_params(0))())
    return OpenRun(tmp_path_factory.mktemp("run"), blueprint, 100, params, {}, None)


@pytest.fixture(scope="module")
def signals(run):
    return Signals(run)


@pytest.fixture(scope="module")
def text():
    return [tiny.packed_batch(seed, tokens=16) for seed in (0, 1)]


def test_signals_and_the_library_skip_the_same(run, signals, text):
    full, ran = signals.without(np.zeros(signals.shape), text)
    cutter = Cutter(run)
    assert full.loss == close_to(cutter.loss(text), terms=64, chain=24) and np.all(ran == 1)
    assert full.flops == model_costs(run.blueprint).forward
    gone, _ = signals.without(np.array([[0.0, 0.0], [1.0, 1.0]]), text)
    assert gone.loss == close_to(cutter.loss(text, [1]), terms=64, chain=24) and gone.loss != full.loss

    ((point, ran),) = signals.points(signals.turned(), (0.4,), text, text, multiply_adds=signals.gate)
    cut = signals.threshold(signals.turned(), 0.4, text)
    there, also = Skipping(run, "nag").point(np.full(1, cut), text)
    assert point.loss == close_to(there.loss, terms=64, chain=24) and 0.2 < point.skipped < 0.6
    assert point.flops == pytest.approx(signals.flops(ran) + there.flops - signals.flops(also), rel=0.05)


def test_gains_are_what_skipping_adds_to_first_order(run, signals, text):
    """Compared with the slope of the loss when one sublayer's step size changes for all tokens."""
    (seen,) = signals.see(text[:1])
    assert seen.gains.shape == seen.turns.shape == (2, 2, *text[0].tokens.shape)
    count, losses = float(np.sum(np.asarray(text[0].weights))), []
    for factor in (0.97, 1.03):
        params = jax.tree.map(lambda x: x, run.params)
        gate = params["blocks"]["mlp"]["gate"]
        gate["alpha"] = gate["alpha"] * np.array([factor, 1.0], np.float32)
        losses.append(Cutter(run.__class__(run.folder, run.blueprint, 100, params, {}, None)).loss(text[:1]) * count)
    slope = (losses[0] - losses[1]) / 0.06
    assert slope == pytest.approx(float(seen.gains[0, 1].sum()), rel=0.02) and abs(slope) > 0.1


def test_a_linear_gain_is_found(signals, text):
    noise = np.random.default_rng(0)
    width, saved = signals.run.config.model.width, signals.saved()
    truth = noise.normal(size=(2, 2, width))
    seen = []
    for batch in text * 40:
        x = noise.normal(size=(2, 2, *batch.tokens.shape, width))
        gains = np.einsum("lsbtd,lsd->lsbt", x, truth) + 0.5
        seen.append(Seen(gains, np.ones(gains.shape), x))
    found = signals.first_order(seen, text * 40)
    np.testing.assert_allclose(found.weights * saved[..., None] * 1.1, truth, atol=0.15)  # the ridge's share
    np.testing.assert_allclose(found.offsets * saved, 0.5, atol=0.1)
    roots = [s._replace(gains=np.exp(0.5 * s.gains)) for s in seen]
    found = signals.fitted(roots, text * 40)
    np.testing.assert_allclose(found.weights * 1.1, truth, atol=0.15)
    np.testing.assert_allclose(found.offsets, 0.5 - np.log(saved), atol=0.1)
    assert signals.correlation(found, roots) > 0.99
    worth = signals.mean_square(seen) / saved
    assert signals.least(seen, 1).sum() == 1 and signals.least(seen, 1).ravel()[np.argmin(worth)] == 1
    np.testing.assert_allclose(signals.scaled(seen).turns, np.sqrt(worth))


def test_a_sublayer_saves_what_it_costs(run, signals):
    """An MLP saves all its matrices; attention saves everything except keys and values."""
    saved = signals.saved() * model_costs(run.blueprint).forward
    model = run.config.model
    gate = 2 * signals.gate
    assert saved[0, 1] == pytest.approx(2 * 3 * model.width * model.hidden + gate)
    seen = 2 * 2 * model.heads * model.head_width * (model.context + 1) / 2
    assert saved[1, 0] == pytest.approx(2 * 2 * model.width * model.heads * model.head_width + seen + gate)


def records(learned: float, seeds: int = 3, steps=(200, 1000)) -> list[Record]:
    """Losses that rise with the FLOPs left out; by the fitted gain `learned` as fast as by all others."""
    found = []
    for seed in range(seeds):
        slope = {way: (learned if way == "learned" else 1.0) + 0.01 * seed for way in WAYS}
        line = lambda tilt: [Point(r, 100.0 * (1 - r), 3.0 + tilt * r, 0.5) for r in (0.0, 0.1, 0.2, 0.3)]  # noqa: E731
        curves = {way: line(tilt) for way, tilt in slope.items()}
        metrics = {"loss": 3.0, "curves": curves, "correlation": {"angle": 0.1, "learned": 0.2}}
        found += [Record("", {"steps": count, "seed": seed}, {}, metrics) for count in steps]
    return found


def test_verdicts():
    assert added(records(0.5), 200, "learned", 0.8) == pytest.approx({0: 0.1, 1: 0.102, 2: 0.104})
    won = summarise(SIZES["cpu"], records(0.5))
    assert won.verdict == "supported" and "205k tokens: by the fitted square +0.0765" in won.measured
    assert len(won.table) == 2 * len(WAYS) and len(gaps(records(0.5), 1000)) == 3 * len(READ)
    assert summarise(SIZES["cpu"], records(1.5)).verdict == "not supported"
    assert summarise(SIZES["cpu"], records(1.0)).verdict == "undecided"
    broken = [*records(0.5), Record("", {"steps": 200, "seed": 3}, {}, {"loss": None, "diverged": "loss"})]
    assert summarise(SIZES["cpu"], broken).verdict == "supported"


def test_every_length_is_a_run_of_its_own():
    jobs = plan(SIZES["cpu"])
    assert [job.name for job in jobs][:3] == ["200-s1", "1000-s1", "200-s2"]
    assert {job.run_config.train.steps for job in jobs} == {200, 1000}
