"""What the probe streams, against the same measures of the tensors it keeps on request; and with Mixture-of-Depths and
a mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.layers.config import LoRAConfig
from nagjax.layers.lora import merged
from nagjax.measure import angles, norms, outliers
from nagjax.measure.probe import _probe, probe
from nagjax.mod import ModConfig
from nagjax.residual import find_scheme
from nagjax.runs.blueprint import build_model
from nagjax.train.distributed.mesh import batch_sharding
from tests import tiny
from tests.own_models import residual
from tests.streams import one_per_layout
from tests.tiny import blueprint, created, fresh, moved, packed_batch, run_config
from tests.tolerance import assert_close, close_to

SOME = 12


@functools.cache
def looked_at(name):
    """A model, and everything that the probe returns for it."""
    scheme = find_scheme(name)()
    model = blueprint(run_config(scheme)).model(moved(created(scheme).params))
    return model, probe(model, packed_batch(), full=True, sample=SOME)


def test_a_model_that_is_no_transformer_is_refused():
    with pytest.raises(UserError, match="model = 'NAG': .*observe=True"):
        probe(residual(), packed_batch())


def test_of_no_token_there_is_no_mean():
    """As in a conversation, where no first token counts, and in some sequences none."""
    (model, seen), batch = looked_at("plain"), packed_batch()
    weights = np.where((batch.positions > 0) & (np.arange(len(batch.tokens)) >= 3)[:, None], batch.weights, 0)
    fewer = probe(model, batch._replace(weights=weights.astype(np.float32)), full=True, sample=SOME)
    np.testing.assert_array_equal(fewer.counts["groups"], [weights.sum(), 0])
    for values in (*fewer.sublayers.values(), *fewer.blocks.values(), fewer.massive_max):
        assert np.all(np.isfinite(values[:, 0])) and np.all(np.isnan(values[:, 1]))
    assert np.all(fewer.jacobian > 0.1 * seen.jacobian) and fewer.counts["jacobian"] > 0
    with pytest.raises(UserError, match="batch = .*no token inside its documents counts"):
        probe(model, batch._replace(weights=np.zeros_like(batch.weights)))


def test_the_last_depth_is_the_model_s_own_prediction_where_only_the_residual_is_float32():
    plan = blueprint(run_config(find_scheme("reordered")(), dtype="bfloat16", residual_dtype="float32"))
    seen = probe(plan.model(moved(fresh(plan).params)), packed_batch(), sample=SOME)
    assert seen.lens["divergence"][-1] == 0 and seen.lens["divergence"][0] > 1e-4


@pytest.mark.parametrize("name", one_per_layout())
def test_any_stream_is_read_at_every_depth_as_the_head_reads_it(name):
    model, seen = looked_at(name)
    for values in (*seen.lens.values(), seen.sample):
        assert values.shape[0] == model.config.depth + 1 and np.isfinite(values).all()
    assert seen.lens["divergence"][0] > 1e-4 and abs(seen.lens["divergence"][-1]) < 1e-5
    assert np.isfinite(seen.sublayers["norm"]).all()


@pytest.mark.parametrize("name", ["plain", "nag"])
def test_streamed_statistics_are_those_of_the_tensors(name):
    (model, seen), batch = looked_at(name), packed_batch()
    sublayers, shape = model.config.sublayers, (*batch.tokens.shape, model.config.width)
    assert seen.before.shape == seen.after.shape == (sublayers, *shape)
    assert_close(seen.before[1:], seen.after[:-1], **tiny.FORWARD)
    for group, inside in enumerate((batch.positions > 0, batch.positions == 0)):
        counted = inside & (batch.weights > 0)
        mean = lambda x: np.asarray(x)[:, counted].mean(axis=1)  # noqa: B023, E731
        h0, h1 = seen.before, seen.after
        expected = {
            "norm": norms.norm(h0),
            "variance": norms.variance(h0),
            "contribution": norms.relative_contribution(h1 - h0, h0),
            "cosine": norms.cosine(h1 - h0, h0),
            "turn": angles.angle(h0, h1),
            "kurtosis": outliers.kurtosis(h1),
            "massive": outliers.massive_ratio(h1),
        }
        for what, values in expected.items():
            assert_close(seen.sublayers[what][:, group], mean(values), **tiny.FORWARD, scale=1.0, err_msg=what)
        influence = mean(1 - norms.cosine(h0[::2], h1[1::2]))
        assert_close(seen.blocks["influence"][:, group], influence, **tiny.FORWARD, scale=1.0)
    inside = np.flatnonzero((batch.positions > 0) & (batch.weights > 0))
    kept = np.sort(np.random.default_rng(0).permutation(inside)[:SOME])
    ends = np.concatenate([seen.before[:1], seen.after[1::2]]).reshape(4, -1, model.config.width)
    assert_close(seen.sample, ends[:, kept], **tiny.FORWARD)
    output = nnx.jit(lambda model: model(batch.tokens, batch.where, observed=True))(model)
    logits = np.asarray(model.logits(output), np.float64).reshape(-1, model.config.vocab)
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    loss = -log_p[kept, batch.targets.ravel()[kept]].mean()
    assert seen.lens["loss"][-1] == close_to(loss, **tiny.FORWARD)
    assert seen.lens["divergence"][-1] == pytest.approx(0, abs=1e-6) and seen.lens["divergence"][0] > 0.01
    assert (seen.gates is None) == (name == "plain")
    if seen.gates:
        np.testing.assert_allclose(np.arctan(seen.gates["turn"]), seen.sublayers["turn"][:, 0], rtol=0.1)


def test_an_attention_row_of_the_probe_is_the_model_s():
    """The first block's, in numpy."""
    (model, seen), batch = looked_at("plain"), packed_batch()
    first = jax.tree.map(lambda x: x[0], nnx.split(model.blocks.attention)[1])
    own = nnx.merge(nnx.split(model.blocks.attention)[0], first)
    x = np.asarray(model.embedding(batch.tokens, batch.where, jnp.float32), np.float64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(own.entry.gain[...])
    x = jnp.asarray(x, jnp.float32)
    q, k = own.branch.queries(x, batch.where), own.branch.keys_values(x, batch.where).keys
    given = [[], []]
    for b, t in np.argwhere((batch.positions > 0) & (batch.weights > 0)):
        may = (batch.segment_ids[b] == batch.segment_ids[b, t]) & (np.arange(len(batch.tokens[0])) <= t)
        for head in range(2):
            score = np.exp(np.asarray(k[b, may, 0] @ q[b, t, head]) / np.sqrt(q.shape[-1]))
            given[head].append(score[0] / score.sum())
    assert_close(seen.attention[0], np.mean(given, axis=1), **tiny.FORWARD, scale=1.0)


def test_attention_of_a_model_with_adapters_is_that_of_the_merged_one():
    lora, batch = LoRAConfig(rank=2), packed_batch()
    plan, alone = (blueprint(run_config(find_scheme("plain")(), **own)) for own in ({"lora": lora}, {}))
    params = moved(fresh(plan).params, 0.3)
    seen, same = probe(plan.model(params), batch), probe(alone.model(merged(params, lora)), batch)
    assert_close(seen.attention, same.attention, **tiny.FORWARD)
    assert_close(seen.sublayers["turn"], same.sublayers["turn"], **tiny.FORWARD)


@pytest.mark.parametrize(
    "options",
    [{}, {"kv": "selected", "unit": "block"}, {"kv": "selected", "router": "random"}],
    ids=str,
)
def test_attention_goes_to_the_tokens_that_a_query_sees(options):
    """To a first token that skips only where its key is seen; the first block's, in numpy."""
    plan = blueprint(run_config(find_scheme("nag")(), mod=ModConfig(rate=(0.5,), **options)))
    model, batch = plan.model(moved(fresh(plan).params)), packed_batch()
    at = model.boundary(None, jax.tree.map(lambda x: x[0], model.blocks.attention.entry), 0, 1, jnp.float32(1.0))
    stream = model.scheme.open(model.embedding(batch.tokens, batch.where, jnp.float32), at, model.ends)
    branch = jax.tree.map(lambda x: x[0], model.blocks.attention.branch)
    q, k = map(np.asarray, branch.queries_keys(model.scheme.read(stream), batch.where))
    ran = np.asarray(nnx.jit(lambda model: model(batch.tokens, batch.where, mapped=True).paths["ran"][0])(model))
    first = (batch.positions == 0) & (batch.weights > 0)
    assert np.any(ran[first]) and not np.all(ran[first])
    given = []
    for b, t in np.argwhere((batch.positions > 0) & (batch.weights > 0) & ran):
        may = (batch.segment_ids[b] == batch.segment_ids[b, t]) & (np.arange(len(batch.tokens[0])) <= t)
        may &= ran[b] | (options.get("kv") != "selected")
        score = np.where(may, np.exp(np.einsum("hd,sd->hs", q[b, t], k[b, :, 0]) / np.sqrt(q.shape[-1])), 0.0)
        given.append(score[:, first[b]].sum(1) / score.sum(1))
    assert_close(probe(model, batch).attention[0], np.mean(given, axis=0), **tiny.FORWARD, scale=1.0)


def test_a_probe_on_a_mesh_with_routed_tokens():
    """Two devices that split the batch give what one gives; skipped tokens are marked, their residual unchanged."""
    changes = {"mod": ModConfig(rate=(0.5,), router="linear"), "depth": 2}
    config = run_config(find_scheme("plain")(), **changes)
    one, two = blueprint(config), blueprint(config, data=2)
    params, batch = moved(fresh(one).params), packed_batch()
    whole = probe(one.model(params), batch, full=True, sample=SOME)
    np.testing.assert_allclose(whole.sublayers["ran"][:, 0].mean(), 0.5, atol=0.2)
    still = np.all(np.asarray(whole.before == whole.after), axis=-1)
    assert 0.3 < still.mean() < 0.7
    placed = jax.device_put(params, two.shardings().params), jax.device_put(batch, batch_sharding(two.mesh))
    split = probe(two.model(placed[0]), placed[1], sample=SOME, mesh=two.mesh)
    assert split.before is None
    for field in ("sublayers", "blocks", "attention", "sample", "lens", "jacobian"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
            getattr(split, field),
            getattr(whole, field),
        )


def test_only_sampled_tokens_are_kept_at_every_depth():
    """The lowered program has no array of all tokens at all depths, unless asked for it."""
    graph, params = nnx.split(nnx.eval_shape(lambda: build_model(run_config(find_scheme("plain")()), 0)))

    def text(full):
        static = {"graph": graph, "full": full, "causal": False, "mesh": None}
        return _probe.lower(params, packed_batch(), jnp.arange(SOME), jnp.float32(1.0), None, **static).as_text()

    whole = re.compile(r"tensor<3x(1x)?(2x)?8x8x16x")
    assert whole.search(text(True)) and not whole.search(text(False))
