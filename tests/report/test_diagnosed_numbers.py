"""Numbers of a diagnosis against what they are by definition, one block at a time."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nagjax.measure.cuts import forward_options
from nagjax.measure.interventions import past, rebuilt, residual, through
from nagjax.report import diagnosis
from nagjax.report.diagnosis import Text
from nagjax.train.loss import cross_entropy
from tests.report.test_counted_tokens import opened
from tests.tiny import packed_batch
from tests.tolerance import assert_close

FORWARD, STEP = {"terms": 257, "chain": 24}, {"terms": 257, "chain": 72}


@pytest.fixture(scope="module")
def run():
    return opened("plain")


@pytest.fixture(scope="module")
def text() -> Text:
    """The second batch has fewer targets, each of which counts three times as much as one of the first."""
    first, second = (packed_batch(seed, batch=2, vocab=257) for seed in (0, 1))
    batches = [first, second._replace(weights=second.weights * (second.positions != 1))]
    return Text(batches, np.array([float(batch.weights.sum()) for batch in batches]), np.array([0.5, 1.5]))


def test_an_added_loss_and_its_standard_error():
    found = diagnosis._added(np.array([[1.0, 3.0], [2.0, 2.0]]), np.ones(2))
    np.testing.assert_allclose(found["added_loss"], [2.0, 2.0])
    np.testing.assert_allclose(found["standard_error"], [1.0, 0.0], atol=1e-12)
    found = diagnosis._added(np.array([1.0, 5.0]), np.array([3.0, 1.0]))
    # Of a mean with shares 3/4 and 1/4: root of 2 / 1 times ((3/4 of -1) squared + (1/4 of 3) squared).
    assert (found["added_loss"], found["standard_error"]) == (2.0, pytest.approx(1.5))
    assert diagnosis._added(np.array([[1.0]]), np.ones(1))["standard_error"] is None


def test_holding_gates_adds_what_the_loss_is_above_the_whole_models(text, monkeypatch):
    """At their means on training text, of as many batches as those on which the losses are taken."""
    asked = []
    run = types.SimpleNamespace(model="model", progress=0.25)

    def losses(*given, **options):
        asked.append((*given, options))
        return {"whole": [1.0, 2.0], "mean": [1.5, 4.5], "one_mean": [3.0, 1.0]}

    monkeypatch.setattr(diagnosis, "holds", lambda model: True)
    monkeypatch.setattr(diagnosis, "text_batches", lambda *given: given)
    monkeypatch.setattr(diagnosis, "held_losses", losses)
    even = text._replace(counts=np.ones(2), scales=np.ones(2))
    found = diagnosis._held_gates(run, even, "data", lambda told: None)
    assert {name: own["added_loss"] for name, own in found.items()} == {"mean": 1.5, "one_mean": 0.5}
    assert asked == [("model", (run, "data", "train", 2), text.batches, {"progress": 0.25})]


def test_gradients_are_norms_with_respect_to_one_block_and_to_the_residual_in_front_of_it(run, text):
    @jax.jit
    def gradients(params, added, batch, block):
        def loss(params, added):
            def intervene(model, stream, call):
                h = residual(model.scheme, stream) + jnp.where(call.layer.block_index == block, added, 0.0)
                return through(model, rebuilt(model, h, call), call), ()

            model = run.blueprint.model(params)
            output = model(batch.tokens, batch.where, progress=1.0, intervene=intervene)
            sums = cross_entropy(model.logits(output), batch)
            return sums.nats / sums.count

        return jax.grad(loss, argnums=(0, 1))(params, added)

    found = diagnosis._gradients(run, text, forward_options(run))
    weights, none = text.counts * text.scales, jnp.zeros((2, 8, 16))
    for block in (0, 2):
        own = [gradients(run.params, none, batch, block) for batch in text.batches]
        norms = [
            (optax.tree.norm(jax.tree.map(lambda leaf, i=block: leaf[i], params["blocks"])), optax.tree.norm(added))
            for params, added in own
        ]
        want = weights @ np.array(norms, np.float64) / weights.sum()
        assert_close((found["parameters"][block], found["residual"][block]), tuple(want), **STEP)


def test_a_skipped_block_is_one_pass_without_it_against_one_with_it(run, text):
    @jax.jit
    def pass_without(params, batch, block):
        def intervene(model, stream, call):
            run, skip = (lambda own: through(model, own, call)), (lambda own: past(model, own, call))
            after = jax.lax.cond(call.layer.block_index == block, skip, run, stream)
            return after, residual(model.scheme, after) - residual(model.scheme, stream)

        model = run.blueprint.model(params)
        output = model(batch.tokens, batch.where, progress=1.0, intervene=intervene)
        return model.logits(output), output.seen

    found = diagnosis._skips(run, text, forward_options(run), lambda done: None)
    length = lambda x: np.linalg.norm(np.asarray(x, np.float64), axis=-1)  # noqa: E731
    weights = text.counts * text.scales
    for block in (0, 1):
        losses, outputs, effects, inside = [], [], [], []
        for batch in text.batches:
            (whole, updates), (less, changed) = (pass_without(run.params, batch, own) for own in (-1, block))
            losses.append([float(cross_entropy(logits, batch).nats) for logits in (whole, less)])
            inside.append((batch.weights > 0) & (batch.positions > 0))
            outputs.append(length(jax.nn.softmax(whole) - jax.nn.softmax(less))[inside[-1]])
            later = slice(block + 1, None)
            effects.append((length(updates - changed) / length(updates))[later][:, inside[-1]])
        nats = text.scales @ np.array(losses) / weights.sum()
        tokens = text.scales @ [own.sum() for own in inside]
        assert found["loss"] == pytest.approx(nats[0], rel=1e-5)
        assert_close(found["added_loss"][block], nats[1] - nats[0], **FORWARD, scale=nats[0])
        assert_close(found["output_effect"][block], text.scales @ [own.sum() for own in outputs] / tokens, **FORWARD)
        mean = sum(scale * own.sum(axis=1) for scale, own in zip(text.scales, effects, strict=True)) / tokens
        assert_close(found["mean_effects"][block, later], mean, **FORWARD)
        assert_close(found["effects"][block, later], np.concatenate(effects, axis=1).max(axis=1), **FORWARD)
        assert abs(found["added_loss"][block]) > 1e-3 and not found["effects"][block, : block + 1].any()
