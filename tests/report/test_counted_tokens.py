"""What is measured is over counted tokens: whatever the batches, whatever the corpus, and nothing is nothing."""

import copy
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.data import DataConfig, load_tokenizer, prepare
from nagjax.errors import UserError
from nagjax.measure import counted, damage
from nagjax.measure.cuts import Cutter, choose, forward_options
from nagjax.measure.interventions import erased, skipping, tapped
from nagjax.measure.masked import MaskedBatch
from nagjax.mod import ModConfig
from nagjax.report import diagnosis
from nagjax.report.curve import text_batches
from nagjax.report.curve_plot import curve_plot
from nagjax.report.depth_figures import draw_diagnosis
from nagjax.report.diagnose_report import diagnosis_page
from nagjax.report.diagnosis import Effort, diagnose
from nagjax.residual.registry import find_scheme, schemes
from nagjax.runs.opening import OpenRun, open_run
from nagjax.train.evaluator import Evaluator, corpus_of
from tests import tiny
from tests.streams import one_per_stream
from tests.tiny import blueprint, moved, run_config
from tests.tolerance import assert_close

SMALL = Effort(probes=2, skips=2, curve=2)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> DataConfig:
    """Nine rows in ten are of a text of one letter."""
    folder, mix = tmp_path_factory.mktemp("mix"), []
    for name, text, share in (("easy", "aaaa", 0.9), ("hard", "q8#Zf?x", 0.1)):
        train, held = (folder / f"{name}-{split}.txt" for split in ("train", "held"))
        train.write_text(text * 81)  # a document that is held out is not trained on
        held.write_text(text * 80)
        prepare([str(train)], folder / name, validation=0.0, held_out=[str(held)])
        mix.append(f"{folder / name}={share}")
    return DataConfig(mix=tuple(mix))


def opened(scheme: str, data: DataConfig | None = None, **model) -> OpenRun:
    config = run_config(find_scheme(scheme)(), depth=3, vocab=257, train={"batch": 2}, **model)
    plan = blueprint(dataclasses.replace(config, data=data) if data else config)
    state = plan.create()
    return OpenRun(Path("run"), plan, 100, moved(jax.device_get(state.params), 0.3), state.mod, load_tokenizer("bytes"))


@pytest.fixture(scope="module")
def diagnosed(run_folder) -> dict:
    return diagnose(open_run(run_folder), SMALL, rules=("late",))


def test_of_a_mixture_losses_are_those_of_evaluations(mixture):
    run = opened("plain", mixture)
    text = text_batches(run, None, "validation", 4)
    told, _ = (own := Evaluator(run.blueprint))(run.params, run.mod, run.step, list(own.batches(4)))
    assert Cutter(run).loss(text) == pytest.approx(told["loss"], rel=1e-5)
    nats = Cutter(run).batch_nats(text)
    assert abs(nats[:, 0].sum() / nats[:, 1].sum() - told["loss"]) > 0.01
    assert {corpus_of(batch) for batch in counted.first_of_each(text, 1)} == {0, 1}
    assert len(counted.first_of_each(text, 3)) == 3


def test_means_are_over_tokens():
    values, tokens = np.array([[1.0, 2.0], [4.0, np.nan]]), np.array([[3, 1], [1, 0]])
    np.testing.assert_allclose(counted.mean(values, tokens), [1.75, 2.0])
    assert np.isnan(counted.mean(np.ones(2), np.zeros(2)))
    few = jnp.array([[0, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1]], bool)
    np.testing.assert_array_equal(counted.most_counted(few, 2), [1, 3])
    with pytest.raises(UserError, match="no target in these batches counts"):
        counted.scales(DataConfig(), [None], np.zeros(1))


def test_a_batch_without_a_counted_target_changes_nothing(run_folder, diagnosed, monkeypatch):
    run, given, want = open_run(run_folder), text_batches, diagnosed

    def beside(*args):
        text = given(*args)
        empty = text[0]._replace(weights=np.zeros_like(text[0].weights))
        return [empty, *text]

    monkeypatch.setattr(diagnosis, "text_batches", beside)
    monkeypatch.setattr("nagjax.report.curve.text_batches", beside)
    effort = dataclasses.replace(SMALL, probes=3, skips=3)
    got = diagnose(run, effort, rules=("late",))
    for name in ("sublayers", "blocks", "gradients", "skips", "angular_distance", "lens"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), got[name], want[name])
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    monkeypatch.setattr(diagnosis, "text_batches", lambda *args: beside(*args)[:1])
    with pytest.raises(UserError, match="no target in these batches counts"):
        diagnose(run, effort, rules=("late",))


def test_a_stream_that_its_residual_does_not_tell_is_not_rebuilt():
    run = opened("denseformer")
    batch = jax.tree.map(np.asarray, tiny.packed_batch(vocab=257))
    text = diagnosis.Text([batch], np.array([float(batch.weights.sum())]), np.ones(1))
    found = diagnosis._gradients(run, text, forward_options(run))
    assert found["residual"] is None and np.all(found["parameters"] > 0)
    assert sorted(name for name in schemes() if not find_scheme(name).rebuilds) == [
        "block_attn_res",
        "denseformer",
        "hyper_connections",
        "mhc",
    ]
    for intervene in (skipping(jnp.int32(1), local=True), erased(jnp.int32(1), batch.weights)):
        with pytest.raises(UserError, match="scheme = 'denseformer'"):
            run.model(batch.tokens, batch.where, progress=1.0, intervene=intervene)


def test_of_masked_batches_the_masked_tokens_are_the_targets():
    batch = tiny.packed_batch()
    hidden = np.zeros_like(batch.weights)
    hidden[0, :3] = 1.0
    one = MaskedBatch(batch.tokens, batch.targets, batch.segment_ids, batch.positions, hidden)
    assert diagnosis._tokens(diagnosis.Text([one], np.array([3.0]), np.array([1.0]))) == 3


def test_a_diagnosis_of_such_a_model_has_the_rest(mixture):
    """On a mixture, of which one batch asked for is one of each corpus."""
    run = opened("denseformer", mixture)
    record = diagnose(run, Effort(probes=1, skips=1, curve=1), rules=("late",))
    assert record["blocks"]["jacobian"] is None and record["gradients"]["residual"] is None
    text = text_batches(run, None, "validation", 1)
    assert len(text) == record["skips"]["batches"] == 2 and record["tokens"] == sum(np.sum(b.counted) for b in text)
    assert record["loss"] == pytest.approx(Cutter(run).loss(text), rel=1e-4)
    drawn = draw_diagnosis(record)
    assert "gradients" in {plot.name for plot in drawn} and "jacobian" not in {plot.name for plot in drawn}
    assert "after 1,000 steps" in diagnosis_page(record | {"step": 1000}, drawn)
    page = diagnosis_page(record | {"step": 0}, drawn)  # as of a model that was imported
    assert "after 0 steps" not in page and "earlier removal" not in page
    assert "Jacobian" not in page and "to the residual in front of it" not in page


@pytest.mark.parametrize("scheme", [name for name in one_per_stream() if find_scheme(name).rebuilds])
def test_what_is_rebuilt_is_the_model(scheme):
    """With random parameters: at the start many schemes are alike."""
    run, batch = opened(scheme), tiny.packed_batch(vocab=257)

    @jax.jit
    def logits(meters):
        own = {} if meters is None else {"intervene": tapped(meters)}
        return run.model.logits(run.model(batch.tokens, batch.where, progress=1.0, **own))

    real = batch.segment_ids > 0
    assert_close(logits(jnp.zeros(3))[real], logits(None)[real], **tiny.FORWARD)


def test_a_routed_model_is_measured_as_it_is_scored(mixture):
    run = opened("nag", mixture, mod=ModConfig(rate=(0.5,)))
    run = dataclasses.replace(run, mod={"cuts": jnp.full(6, 0.05)})
    text = text_batches(run, None, "validation", 2)
    scored, top_k = (
        Evaluator(run.blueprint, causal=causal)(run.params, run.mod, run.step, text)[0]["loss"]
        for causal in (True, False)
    )
    assert Cutter(run).loss(text) == pytest.approx(scored, rel=1e-5) and abs(scored - top_k) > 1e-3
    assert forward_options(run)["causal"] and forward_options(run)["cuts"] is run.mod["cuts"]
    assert not forward_options(dataclasses.replace(run, mod={}))["causal"]
    assert not forward_options(opened("nag"))["causal"]


def test_losses_that_are_not_finite():
    assert damage.contributing([0.1, np.inf, np.inf]) == 2.0 and damage.contributing([0.5, np.nan]) == 1.0
    assert np.isnan(damage.depth_score(np.array([[0.0, np.nan], [0.0, 0.0]])))
    known = np.ones((4, 4))
    assert choose("drop", 1, known, known, np.array([np.nan, 0.2, 0.1])) == [2]
    for rule in ("influence", "angle"):
        with pytest.raises(UserError, match="not finite"):
            choose(rule, 1, known * np.nan, known * np.nan)
    curve = {"depth": 4, "loss": 2.0, "rules": {"late": [[0, 2.0, []], [1, None, [3]], [2, 2.5, [2, 3]]]}}
    assert curve_plot([("plain", curve)]).startswith(b"\x89PNG") and "NaN" not in json.dumps(curve)


def test_figures_without_what_was_not_measured(diagnosed):
    record = copy.deepcopy(diagnosed)
    assert record["sampled"] > 0
    names = {plot.name for plot in draw_diagnosis(record)}
    record["blocks"]["jacobian"] = record["gradients"]["residual"] = None
    record["curve"]["rules"]["late"][1][1] = None
    assert names - {plot.name for plot in draw_diagnosis(record)} == {"jacobian"}
    (rank,) = [plot for plot in draw_diagnosis(record) if plot.name == "ranks"]
    assert f"{record['sampled']} sampled tokens" in rank.caption
