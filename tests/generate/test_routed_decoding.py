"""Token by token with the cache, a routed model says what one pass under the same causal rule says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.generate.sample import generate
from nagjax.layers.where import Where
from nagjax.mod import ModConfig, ragged
from nagjax.residual import find_scheme
from tests import tiny
from tests.jaxprs import equations
from tests.tiny_models import full_logits, make_model
from tests.tolerance import assert_close

PROMPTS = [[5, 1, 60, 3, 3, 17, 8], [9], [2, 40, 7]]
CASES = {
    "nag": ("nag", ModConfig(rate=(0.5,))),
    "plain, every other block, random": ("plain", ModConfig(rate=(0.4,), every=2, router="random", kv="selected")),
    "nag, whole blocks, selected keys": ("nag", ModConfig(rate=(0.5,), unit="block", kv="selected")),
    "review, predictor": ("review", ModConfig(rate=(0.5,), decider="predictor")),
}


@pytest.fixture(params=CASES, scope="module")
def model(request):
    name, mod = CASES[request.param]
    return make_model(find_scheme(name)(), mod=mod, depth=3)


@pytest.fixture(scope="module")
def cuts(model):
    return middle_cuts(model)


def forward(model, rows, cuts):
    """Logits, and which tokens ran, by one pass over padded rows."""
    padded, lengths = np.zeros((len(rows), 48), np.int32), np.array([len(row) for row in rows])
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    graph, params = nnx.split(model)
    return jax.device_get(_forward(params, padded, lengths, cuts, graph=graph))


@functools.partial(jax.jit, static_argnames="graph")
def _forward(params, padded, lengths, cuts, *, graph):
    model, where = nnx.merge(graph, params), Where.whole(*padded.shape)
    where = where._replace(segments=(where.positions < lengths[:, None]).astype(jnp.int32))
    output = model(padded, where, cuts=cuts, causal=True, mapped=True)
    return model.logits(output), output.paths["ran"]


def middle_cuts(model):
    rows = np.random.default_rng(0).integers(0, 61, (4, 48))
    graph, params = nnx.split(model)
    run = jax.jit(lambda p: nnx.merge(graph, p)(rows, Where.whole(*rows.shape)).routing["cut"])
    return np.asarray(run(params))


def test_greedy_equals_one_pass_under_the_same_rule(model, cuts, monkeypatch):
    """While prompts are read and tokens written, only tokens that run are computed, in batches of a few sizes."""
    monkeypatch.setattr(ragged, "WORTH_IT", {"rows": 2, "tokens": 4})
    monkeypatch.setattr(ragged, "PARTS", 3)
    written = generate(model, PROMPTS, tokens=9, temperature=0.0, cuts=cuts)
    rows = [prompt + new for prompt, new in zip(PROMPTS, written, strict=True)]
    logits, ran = forward(model, rows, cuts)
    for prompt, new, line in zip(PROMPTS, written, logits, strict=True):
        assert np.argmax(line, -1)[len(prompt) - 1 : len(prompt) + 8].tolist() == new
    routed = np.ravel(model.config.mod.rates(3)) > 0
    share = np.mean([ran[routed, i, : len(row)].mean() for i, row in enumerate(rows)])
    assert 0.1 < share < 0.9


def test_one_token_begins_a_cache(model, cuts, monkeypatch):
    """Where few of a batch's only tokens run."""
    monkeypatch.setattr(ragged, "WORTH_IT", {"rows": 2, "tokens": 4})
    tokens = np.arange(0, 60, 4)[:, None]
    run = lambda cache: model.logits(model(tokens, cuts=cuts, causal=True, cache=cache))  # noqa: E731
    found, expected, by_slots = run(20), run(None), run(model.empty_cache(len(tokens), 20))
    assert_close(found, expected, **tiny.FORWARD)
    assert_close(found, by_slots, **tiny.FORWARD)


def test_step_by_step_logits(model, cuts):
    """The logits themselves, and the same tokens skipped, from an empty cache."""
    rows = np.random.default_rng(1).integers(0, 61, (3, 20))
    graph, params = nnx.split(model)

    @jax.jit
    def steps(params):
        model = nnx.merge(graph, params)

        def step(cache, at):
            token = jax.lax.dynamic_slice_in_dim(rows, at, 1, 1)
            where = Where(np.ones((3, 1), np.int32), jnp.full((3, 1), at, np.int32))
            output = model(token, where, cache=cache, cuts=cuts, causal=True, mapped=True)
            return output.cache, (model.logits(output)[:, 0], output.paths["ran"][..., 0])

        return jax.lax.scan(step, model.empty_cache(3, 20), jnp.arange(20))[1]

    logits, ran = jax.device_get(steps(params))
    whole, whole_ran = forward(model, rows.tolist(), cuts)
    np.testing.assert_array_equal(ran.transpose(1, 2, 0), whole_ran[..., :20])
    assert_close(logits.swapaxes(0, 1), whole[:, :20], **tiny.FORWARD)


def test_packed_documents_are_judged_as_they_are_sampled():
    """Evaluation packs documents; sampling has each alone, token by token: the same tokens run, the same logits."""
    model = make_model(find_scheme("nag")(), mod=ModConfig(rate=(0.5,), kv="selected"), depth=3)
    cuts, lengths = middle_cuts(model) - 0.05, (20, 17, 11)  # 48 in all: together they want more than a context keeps
    texts = [np.random.default_rng(i).integers(0, 61, n) for i, n in enumerate(lengths)]
    segments = np.repeat([1, 2, 3], lengths)[None]
    where = Where(segments, np.concatenate([np.arange(n) for n in lengths])[None])
    graph, params = nnx.split(model)

    @jax.jit
    def packed(params):
        model = nnx.merge(graph, params)
        output = model(np.concatenate(texts)[None], where, cuts=cuts, causal=True, mapped=True)
        return model.logits(output)[0], output.paths["ran"][:, 0]

    @jax.jit
    def sampled(params, text):
        model = nnx.merge(graph, params)

        def step(cache, at):
            token = jax.lax.dynamic_slice_in_dim(text, at, 1, 1)
            here = Where(np.ones((1, 1), np.int32), jnp.full((1, 1), at, np.int32))
            output = model(token, here, cache=cache, cuts=cuts, causal=True, mapped=True)
            return output.cache, (model.logits(output)[0, 0], output.paths["ran"][:, 0, 0])

        return jax.lax.scan(step, model.empty_cache(1, 20), jnp.arange(20))[1]

    logits, ran = jax.device_get(packed(params))
    assert ran[::2].sum(axis=1).max() > 24  # of the 48 that a row of a context has room for
    for i, text in enumerate(texts):
        want, want_ran = jax.device_get(sampled(params, np.resize(text, (1, 20))))
        np.testing.assert_array_equal(ran[:, segments[0] == i + 1], want_ran.T[:, : len(text)])
        assert_close(logits[segments[0] == i + 1], want[: len(text)], **tiny.FORWARD)


def test_a_full_cache_lets_nobody_in():
    """Attention that sees selected tokens holds as many as a context keeps; then later tokens skip it."""
    model = make_model(find_scheme("nag")(), mod=ModConfig(rate=(0.9,), kv="selected", skip="attention"), depth=2)
    everyone = np.full(4, -np.inf, np.float32)
    _, ran = forward(model, [list(range(48))], everyone)
    assert ran[0, 0, :5].all() and not ran[0, 0, 5:].any() and ran[1].all()
    ((cache,),) = model.empty_cache(1, 48)
    assert cache.keys.shape[3] == 5
    written = generate(model, [[1, 2, 3]], tokens=9, temperature=0.0, cuts=everyone)
    logits, _ = forward(model, [[1, 2, 3] + written[0]], everyone)
    assert np.argmax(logits[0], -1)[2:11].tolist() == written[0]


@pytest.mark.parametrize("removed", [{"mlp_rate": (1.0,)}, {"attention_rate": (1.0,), "kv": "selected"}], ids=str)
def test_what_only_removes_sublayers_needs_no_thresholds(removed):
    mod = ModConfig(skip="mlp" if "mlp_rate" in removed else "attention", **removed)
    model = make_model(find_scheme("plain")(), mod=mod)
    written = generate(model, PROMPTS, tokens=4, temperature=0.0)
    rows = [prompt + new for prompt, new in zip(PROMPTS, written, strict=True)]
    for prompt, new, line in zip(PROMPTS, written, full_logits(model, rows), strict=True):
        assert np.argmax(line, -1)[len(prompt) - 1 : len(prompt) + 3].tolist() == new


def test_a_sublayer_nobody_enters_is_not_run():
    """With thresholds that no score reaches, NaNs in every branch's parameters are never read."""
    model = make_model(find_scheme("nag")(), mod=ModConfig(rate=(0.5,), kv="selected"))
    graph, params = nnx.split(model)
    pure = nnx.to_pure_dict(params)
    for kind in ("attention", "mlp"):
        branch = pure["blocks"][kind]["branch"]
        branch.update({name: jnp.full_like(value, jnp.nan) for name, value in branch.items()})
    nnx.replace_by_pure_dict(params, pure)
    broken = nnx.merge(graph, params)
    nobody, everyone = np.full(4, np.inf, np.float32), np.full(4, -np.inf, np.float32)
    assert np.all(np.isfinite(forward(broken, PROMPTS, nobody)[0][:, :1]))
    assert np.all(np.isnan(forward(broken, PROMPTS, everyone)[0][:, :1]))
    assert generate(broken, PROMPTS, tokens=3, temperature=0.0, cuts=nobody) == generate(
        model, PROMPTS, tokens=3, temperature=0.0, cuts=nobody
    )


def branches(jaxpr) -> list[int]:
    """How many ways each choice in a program has."""
    return [len(eqn.params["branches"]) for eqn in equations(jaxpr) if eqn.primitive.name == "cond"]


@pytest.mark.parametrize("unit", ["sublayer", "block"])
def test_while_a_text_is_written_attention_and_mlp_are_computed_for_those_who_run(unit):
    """For none of the rows, or for one of a few numbers of them."""
    rows, model = 16, make_model(find_scheme("nag")(), mod=ModConfig(rate=(0.5,), unit=unit))
    where = Where(jnp.ones((rows, 1), jnp.int32), jnp.zeros((rows, 1), jnp.int32))
    options = {"cache": model.empty_cache(rows, 8), "cuts": jnp.zeros(4), "causal": True}
    program = jax.make_jaxpr(lambda tokens: model(tokens, where, **options).hidden)(jnp.zeros((rows, 1), jnp.int32))
    assert len(ragged.sizes(rows, 1, True)) == 8 and branches(program.jaxpr).count(1 + 8) == 2
