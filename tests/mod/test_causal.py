"""Causal deciders: they read nothing of the future, and their decisions are as defined."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.layers.where import Where
from nagjax.mod import ModConfig, kept
from nagjax.mod.cache import with_room, with_room_by_document
from nagjax.mod.deciders import deciders, find_decider
from nagjax.mod.routers import find_router, routers
from nagjax.residual import find_scheme
from tests import tiny
from tests.mod.routing_models import make
from tests.tolerance import assert_close


def fits(find, *what) -> bool:
    try:
        find(*what)
    except UserError:
        return False
    return True


def scheme_of(router: str):
    """The first scheme that this router can score."""
    schemes = map(find_scheme, {"random": ("lns",)}.get(router, ("plain", "nag")))
    return next(scheme() for scheme in schemes if fits(find_router, router, scheme()))


PLACES = (("sublayer", "all"), ("block", "selected"), ("sublayer", "selected"), ("block", "all"))


def cases():
    """Every router with every decider, adaptive depth by every router that can, half of the blocks. Units and kinds of
    cache take turns, so that every router and every decider meets both of each."""
    for i, router in enumerate(routers()):
        own = find_router(router, scheme_of(router))
        for j, decider in enumerate(deciders()):
            unit, kv = PLACES[(i + j) % len(PLACES)]
            if fits(find_decider, decider, own):
                yield ModConfig(rate=(0.5,), unit=unit, router=router, decider=decider, kv=kv)
        if routers()[router].common:
            unit, kv = PLACES[i % len(PLACES)]
            yield ModConfig(rate=(0.5,), unit=unit, router=router, kv=kv, capacity="adaptive")
    yield ModConfig(rate=(0.5,), decider="predictor", every=2, router="linear")


def cuts_of(model, tokens):
    """The cuts top-k makes on this text: thresholds that let about half of it in."""
    if model.config.mod.adaptive:  # one for all
        fixed = make(model.scheme, dataclasses.replace(model.config.mod, capacity="fixed"), depth=model.config.depth)
        cuts = cuts_of(fixed, tokens)
        return jnp.full_like(cuts, jnp.median(cuts[jnp.isfinite(cuts)]))
    graph, params = nnx.split(model)
    where = Where.whole(*tokens.shape)
    return jax.jit(lambda p: nnx.merge(graph, p)(tokens, where).routing["cut"])(params)


def causal(model, tokens, cuts):
    graph, params = nnx.split(model)

    @jax.jit
    def run(params, tokens, cuts):
        model = nnx.merge(graph, params)
        output = model(tokens, Where.whole(*tokens.shape), cuts=cuts, causal=True, mapped=True)
        return model.logits(output), output.paths["ran"]

    return lambda tokens, cuts=cuts: jax.device_get(run(params, tokens, cuts))


@pytest.mark.parametrize(
    "mod", list(cases()), ids=lambda m: f"{m.unit} {m.router} {m.decider} {m.kv} {m.capacity} {m.every}"
)
def test_the_past_does_not_move(mod):
    """Bit for bit: nothing leaks from later tokens."""
    model = make(scheme_of(mod.router), mod, depth=2)
    tokens = jnp.asarray(tiny.packed_batch().tokens)
    run = causal(model, tokens, cuts_of(model, tokens))
    logits, ran = run(tokens)
    routed = np.ravel(model.config.mod.rates(model.config.depth)) > 0
    assert 0.05 < ran[routed].mean() < 0.95 and ran[~routed].all()
    for t in (3, 6):
        other, others_ran = run(tokens.at[:, t:].set((tokens[:, t:] + 7) % tiny.VOCAB))
        np.testing.assert_array_equal(other[:, :t], logits[:, :t])
        np.testing.assert_array_equal(others_ran[..., :t], ran[..., :t])
        assert np.abs(other[:, t:] - logits[:, t:]).max() > 1e-3


def test_top_k_does_look_ahead():
    """This makes a causal rule necessary: under top-k, later tokens change earlier outputs."""
    model = make(find_scheme("nag")(), ModConfig(rate=(0.5,)))
    tokens, (graph, params) = jnp.asarray(tiny.packed_batch().tokens), nnx.split(model)
    run = jax.jit(lambda p, x: nnx.merge(graph, p)(x, Where.whole(*x.shape), mapped=True).paths["ran"])
    assert np.any(run(params, tokens)[..., :6] != run(params, tokens.at[:, 6:].set(1))[..., :6])


def test_a_token_runs_when_its_score_reaches_the_cut():
    """With one sequence's own cuts, and nothing routed before, the threshold lets in exactly the top k: also where
    the cut was rounded so many units in the last place differently."""
    model = make(find_scheme("nag")(), ModConfig(mlp_rate=(0.0, 0.0, 0.5), skip="mlp"))
    tokens = jnp.asarray(tiny.packed_batch().tokens)[:1]
    cuts = cuts_of(model, tokens)
    run = causal(model, tokens, cuts)
    for off in (0, 60, -60):
        _, ran = run(tokens, cuts * (1 + off * np.finfo(np.float32).eps))
        assert ran[-1].sum() == kept(0.5, tiny.TOKENS) and ran[:-1].all(), off


def test_thresholds_of_minus_infinity_let_everyone_in():
    model, dense = (make(find_scheme("nag")(), ModConfig(rate=rate)) for rate in ((0.5,), (0.0,)))
    tokens = jnp.asarray(tiny.packed_batch().tokens)
    logits, ran = causal(model, tokens, jnp.full(6, -jnp.inf))(tokens)
    want, _ = causal(dense, tokens, None)(tokens)
    assert ran.all()
    assert_close(logits, want, **tiny.FORWARD)


def test_there_is_one_cut_for_each_sublayer():
    model, batch = make(find_scheme("plain")(), ModConfig(rate=(0.5,))), tiny.packed_batch()
    ran = lambda cuts: model(batch.tokens, batch.where, causal=True, cuts=cuts).hidden  # noqa: E731
    for count in (5, 8):
        with pytest.raises(UserError, match="give 6 numbers, one for a sublayer"):
            ran(jnp.zeros(count))
    np.testing.assert_array_equal(ran([0.0] * 6), ran(jnp.zeros(6)))


def test_when_the_cache_is_full_later_tokens_skip():
    wanted = np.array([[1, 0, 1, 1, 1], [0, 0, 0, 1, 1]], bool)
    np.testing.assert_array_equal(with_room(wanted, 2), [[1, 0, 1, 0, 0], [0, 0, 0, 1, 1]])
    np.testing.assert_array_equal(with_room(wanted, 2, jnp.array([1, 2])), [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])


def test_every_document_has_a_cache_of_its_own():
    """By hand, and in a model: what the first document is does not reach the second, full as the cache may be."""
    wanted = np.array([[1, 1, 1, 1, 1, 0, 1, 1]], bool)
    where = Where(np.array([[1, 1, 1, 2, 2, 2, 2, 0]]), np.array([[0, 1, 2, 0, 1, 2, 3, 0]]))
    np.testing.assert_array_equal(with_room_by_document(wanted, 2, where), [[1, 1, 0, 1, 1, 0, 0, 1]])

    model = make(find_scheme("nag")(), ModConfig(rate=(0.5,), kv="selected"))
    text = np.random.default_rng(0).permutation(tiny.VOCAB)[:12].astype(np.int32)
    segments, positions = np.repeat([1, 2], 4)[None], np.tile(np.arange(4), 2)[None]
    everyone, (graph, params) = jnp.full(6, -jnp.inf), nnx.split(model)

    def run(tokens, where):
        model = nnx.merge(graph, params)
        output = model(tokens, where, cuts=everyone, causal=True, mapped=True)
        return model.logits(output), output.paths["ran"]

    run, packed = jax.jit(run), Where(jnp.asarray(segments), jnp.asarray(positions))
    (logits, ran), (other, _) = run(text[None, :8], packed), run(np.append(text[8:], text[4:8])[None], packed)
    assert ran.all()
    np.testing.assert_array_equal(other[:, 4:], logits[:, 4:])
    alone, _ = run(text[None, 4:8], Where.whole(1, 4))
    assert_close(logits[:, 4:], alone, **tiny.FORWARD)


def test_random_scores_are_uniform_and_know_only_their_place():
    model = make(find_scheme("plain")(), ModConfig(rate=(0.5,), router="random"))
    from nagjax.residual import Boundary

    def scores(where, index=1, noise=0):
        at = Boundary(None, None, jnp.int32(index), jnp.int32(0), None, 8)
        stream = jnp.zeros((*where.positions.shape, 1))  # of which only the place counts
        return np.asarray(model.mod.router.score(None, stream, None, at, where, jnp.uint32(noise)))

    whole = Where.whole(64, 256)
    all_of_them = scores(whole)
    assert abs(all_of_them.mean() - 0.5) < 0.01 and abs(all_of_them.std() - 12**-0.5) < 0.005
    for axis_corr in (np.corrcoef(all_of_them[:, 0], all_of_them[:, 1]), np.corrcoef(all_of_them[0], all_of_them[1])):
        assert abs(axis_corr[0, 1]) < 0.4
    assert abs(np.corrcoef(all_of_them.ravel(), scores(whole, 2).ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(all_of_them.ravel(), scores(whole, noise=1).ravel())[0, 1]) < 0.03
    later = Where(*(x[:, 100:101] for x in whole))
    np.testing.assert_array_equal(scores(later)[:, 0], all_of_them[:, 100])
