"""Mixture-of-Depths around branches of a user's own."""

import dataclasses
import itertools
import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.layers.branch import Mixing
from nagjax.layers.where import Where
from nagjax.mod import ModConfig
from nagjax.mod.module import MixtureOfDepths, Routed
from nagjax.residual import find_scheme
from nagjax.residual.module import Residual
from nagjax.residual.schemes.plain import Plain
from nagjax.train.step import Cuts, _averaged
from tests import tiny
from tests.mod.routing_models import make
from tests.own_models import WIDTH, branches_of, residual, residual_of, stacked
from tests.tiny import created

TOKENS = 8


def tanh(x):
    return jnp.tanh(3.0 * x)


class Average:
    """A branch whose tokens read each other: it returns the mean over all tokens, the same for each."""

    def keys_values(self, x, where):
        return jnp.mean(x, axis=1, keepdims=True) + 0.0 * x

    def mix(self, x, where, known, seen):
        return 2.0 * known[:, : x.shape[1]]


@pytest.mark.parametrize("name", ["nag", "plain", "hyper_connections"])
def test_chosen_tokens_run_as_without_routing_and_the_others_pass(name):
    own = MixtureOfDepths(residual(name, 1), 0.25, rngs=nnx.Rngs(1), router="auto" if name == "nag" else "random")
    x = jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))
    for branch, update in ((tanh, tanh), (Average(), lambda x: 2.0 * jnp.mean(x, axis=1, keepdims=True) + 0.0 * x)):
        got, routed = jax.jit(lambda x, branch=branch: own(x, [branch], progress=1.0, noise=0))(x)
        assert routed.ran.shape == (1, 2, TOKENS) and routed.ran.dtype == bool
        assert own.kept(TOKENS) == 6 and (routed.ran.sum(-1) == 6).all()
        whole = own.residual(x, [update], progress=1.0)
        still = own.residual(x, [jnp.zeros_like], progress=1.0)
        want = jnp.where(routed.ran[0][..., None], whole, still)
        if name != "hyper_connections":  # whose mixing moves a token with a zero update
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got[routed.ran[0]], whole[routed.ran[0]], rtol=1e-5, atol=1e-5)


def test_it_is_the_transformers():
    """nagjax's own branches, in its Transformer and in the module."""
    model, batch = make(find_scheme("nag")(), ModConfig(rate=(0.25,))), tiny.packed_batch()
    own = MixtureOfDepths(residual_of(model), 0.25)

    @jax.jit
    def run(own, model):
        x = model.embedding(batch.tokens, batch.where, jnp.float32)
        branches = [*branches_of(model, batch.where)]
        blocks = [jax.tree.map(lambda x, i=i: x[i], model.blocks) for i in range(model.config.depth)]
        branches[::2] = [block.attention.branch for block in blocks]
        hidden, routed = own(x, branches, where=Where(*map(jnp.asarray, batch.where)), progress=1.0)
        output = model(batch.tokens, batch.where)
        return hidden, output.hidden, jnp.mean(routed.cut, axis=-1), output.routing["cut"]

    hidden, wanted, cut, cuts = run(own, model)
    np.testing.assert_allclose(hidden, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(cut, cuts, rtol=1e-4, atol=1e-5)


def test_routers_and_gates_have_gradients_and_padding_takes_no_place():
    own = MixtureOfDepths(residual("plain", 2), 0.5, rngs=nnx.Rngs(1))
    x, stack = jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH)), stacked(sublayers=2)
    branches = [jax.tree.map(lambda p, i=i: p[i], stack) for i in range(2)]
    grads = jax.jit(nnx.grad(lambda own: jnp.sum(own(x, branches)[0] ** 2)))(own)
    assert np.abs(grads.routing.router.weight[...]).max(axis=1).min() > 0
    where = Where.whole(2, TOKENS)
    padded = where._replace(segments=where.segments.at[:, 4:].set(0))
    _, routed = own(x, branches, where=padded)
    assert routed.ran[:, :, :4].all() and not routed.ran[:, :, 4:].any()


def test_causally_by_average_cuts():
    own = MixtureOfDepths(residual("nag", 1), 0.5)
    x = jax.random.normal(jax.random.key(0), (1, TOKENS, WIDTH))
    _, routed = own(x, [tanh], progress=1.0)
    cuts = routed.cut[:, 0] - 1e-6
    got, causal = own(x, [tanh], progress=1.0, causal=True, cuts=cuts)
    np.testing.assert_array_equal(causal.ran, routed.ran)
    part, _ = own(x[:, :5], [tanh], progress=1.0, causal=True, cuts=cuts)
    np.testing.assert_allclose(part, got[:, :5], rtol=1e-5, atol=1e-5)


def test_cuts_are_averaged_over_the_sequences_that_have_one():
    """A sequence with fewer real tokens than places lets all of them in: its cut is -inf, and says nothing."""
    own = MixtureOfDepths(residual("nag", 2), 0.5)
    x = jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))
    whole = Where.whole(2, TOKENS)
    short = whole._replace(segments=whole.segments.at[1, 2:].set(0))
    none = whole._replace(segments=whole.segments.at[:, 2:].set(0))
    first, second, third = (own(x, [tanh] * 2, progress=1.0, where=where)[1] for where in (none, short, whole))
    cuts = first.averaged_cuts()
    assert cuts.shape == (2,) and jnp.all(cuts == -jnp.inf)  # nothing is known
    cuts = second.averaged_cuts(cuts)
    np.testing.assert_allclose(cuts, second.cut[:, 0])
    moved = third.averaged_cuts(cuts, 0.75)
    np.testing.assert_allclose(moved, 0.75 * cuts + 0.25 * third.cut.mean(-1), rtol=1e-6)
    np.testing.assert_array_equal(first.averaged_cuts(moved), moved)
    with pytest.raises(UserError, match="step = -1: .*from 0"):
        third.averaged_cuts(cuts, step=-1)
    one = jax.tree.map(lambda leaf: leaf[0], third)  # of `advance`
    np.testing.assert_allclose(one.averaged_cuts(cuts[0], 0.75), moved[0])


def test_the_average_of_cuts_forgets_a_ramp_as_the_trainers_does():
    """NAG's angles start at 0, and so do its cuts. 0.99 alone keeps a twentieth of the first one for 300 steps."""
    cuts = jnp.linspace(0.0, 0.5, 20).tolist() + 280 * [0.5]
    own, constant, state = None, None, created(find_scheme("nag")())._replace(mod={"cuts": jnp.full(1, -jnp.inf)})
    for step, cut in enumerate(cuts):
        routed = Routed(jnp.ones((1, 1, 4), bool), jnp.full((1, 1), cut), jnp.zeros((1, 1)))
        own, constant = routed.averaged_cuts(own, step=step), routed.averaged_cuts(constant)
        if step < 40:
            state = state._replace(guard=state.guard._replace(good=jnp.int32(step)))
            state = state._replace(mod=_averaged(state, Cuts(jnp.full(1, cut), jnp.ones(1)), ModConfig()))
            np.testing.assert_array_equal(own, state.mod["cuts"])
    assert abs(own - 0.5) < 1e-3 and constant < 0.48
    traced = jax.jit(lambda routed, cuts, step: routed.averaged_cuts(cuts, step=step))
    np.testing.assert_allclose(traced(routed, own, jnp.int32(299)), routed.averaged_cuts(own, step=299), rtol=1e-6)


def test_no_sequences_no_work():
    own = MixtureOfDepths(residual("nag", 1), 0.5)
    got, routed = own(jnp.ones((0, TOKENS, WIDTH)), [tanh], progress=1.0)
    assert got.shape == (0, TOKENS, WIDTH) and routed.ran.shape == (1, 0, TOKENS)
    got, _ = own(jnp.ones((0, TOKENS, WIDTH)), [tanh], progress=1.0, causal=True, cuts=jnp.zeros(1))
    assert got.shape == (0, TOKENS, WIDTH)
    linear = MixtureOfDepths(residual("plain", 1), 0.5, rngs=nnx.Rngs(0))
    for module, causal in itertools.product((own, linear), (False, True)):
        how = {"causal": True, "cuts": jnp.zeros(1)} if causal else {}
        got, routed = module(jnp.ones((2, 0, WIDTH)), [tanh], progress=1.0, **how)
        assert got.shape == (2, 0, WIDTH) and routed.ran.shape == (1, 2, 0)


@dataclasses.dataclass(frozen=True)
class Counting(Plain):
    """Plain, whose stream also counts each token's updates, in whole numbers."""

    name: ClassVar[str] = "counting"

    def open(self, x, at, ends):
        return super().open(x, at, ends), jnp.zeros((*x.shape[:2], 1), jnp.int32)

    def read(self, stream):
        return super().read(stream[0])

    def advance(self, stream, update, at):
        after = super().advance(stream[0], update, at)
        return (after[0], stream[1] + 1), after[1]

    def skip(self, stream, at):
        return super().skip(stream[0], at), stream[1]

    def close(self, stream, ends):
        return super().close(stream[0], ends)

    def lanes(self, stream):
        return super().lanes(stream[0])


def test_a_stream_may_hold_whole_numbers():
    inner = Residual(Counting(), WIDTH, 2, rngs=nnx.Rngs(0))
    own, x = MixtureOfDepths(inner, 0.25, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))
    stream, ran = inner.open(x, 1.0), []
    for i in (1, 2):
        stream, routed = own.advance(stream, tanh, i)
        ran.append(routed.ran)
    np.testing.assert_array_equal(stream.rows[1][..., 0], sum(one.astype(int) for one in ran))
    assert 0 < sum(ran).sum() < 2 * x.shape[0] * TOKENS


def test_nags_router_goes_by_the_size_of_the_turn():
    """The tokens that turn most run, also where a step size has learned to be negative."""
    own, x = MixtureOfDepths(residual("nag", 2), 0.5), jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))
    _, before = own(x, [jnp.zeros_like] * 2, progress=1.0)
    alpha = own.residual.gate.alpha
    alpha[...] = -alpha[...]
    _, after = own(x, [jnp.zeros_like] * 2, progress=1.0)
    np.testing.assert_array_equal(before.ran, after.ran)
    np.testing.assert_allclose(before.cut, after.cut)
    assert before.cut.min() > 0


def test_a_gradient_through_all_sublayers_is_as_large_as_their_parameters_once():
    """Not once for each sublayer, as slices of all would make it."""
    sublayers = 6
    own = MixtureOfDepths(residual("review", sublayers), 0.5, rngs=nnx.Rngs(1))
    x = jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))
    jaxpr = jax.make_jaxpr(nnx.grad(lambda own: jnp.sum(own(x, [tanh] * sublayers)[0])))(own)
    shapes = [v.aval.shape for equation in jaxpr.eqns for v in equation.outvars]
    assert 0 < shapes.count((sublayers, WIDTH, WIDTH)) < sublayers


def test_what_does_not_fit_is_refused():
    own, linear = MixtureOfDepths(residual(), 0.25), MixtureOfDepths(residual("plain"), 0.25, rngs=nnx.Rngs(0))
    x = jnp.ones((2, TOKENS, WIDTH))
    for call, field in (
        (lambda: MixtureOfDepths("nag", 0.5), "residual"),
        (lambda: MixtureOfDepths(residual(), 1.0), "rate"),
        (lambda: MixtureOfDepths(residual(), "0.5"), "rate"),
        (lambda: MixtureOfDepths(residual("plain"), 0.25), "rngs"),
        (lambda: MixtureOfDepths(residual("plain"), 0.25, router="nag"), "^router"),
        (lambda: own(x, [tanh] * 3, progress=1.0), "branches"),
        (lambda: own(x, [x] * 4, progress=1.0), "branch"),
        (lambda: own.advance(own.residual.open(x, 1.0), x, 1), "branch"),
        (lambda: own(x, [tanh] * 4, progress=1.0, noise=-1), "noise"),
        (lambda: own(x, [tanh] * 4, progress=1.0, noise=0.5), "noise"),
        (lambda: own(x, [tanh] * 4, progress=1.0, cuts=jnp.zeros(4)), "cuts"),
        (lambda: MixtureOfDepths(residual("plain"), 0.25, rngs=0), "rngs"),
        (lambda: MixtureOfDepths(residual("plain"), 0.25, rngs=nnx.Rngs(dropout=0)), "rngs"),
        (lambda: own(x, stacked(), progress=1.0), "branches"),
        (lambda: own(x, [lambda x: x[..., :1]] * 4, progress=1.0), "update"),
        (lambda: own(x, [tanh] * 4, progress=1.0, causal=True, cuts=jnp.zeros(3)), "cuts"),
        (lambda: own(x[0], [tanh] * 4, progress=1.0), "x"),
        (lambda: own(x, [tanh] * 4, progress=1.0, causal=True), "cuts"),
        (lambda: own.advance(own.residual.open(x, 1.0), tanh, 0), "i"),
        (lambda: own.advance(own.residual.open(x, 1.0), tanh, 1, causal=True), "^cut"),
        (lambda: own.advance(own.residual.open(x[0], 1.0), tanh, 1), "stream"),
        (lambda: own.advance(x, tanh, 1), "stream"),
        (lambda: linear.advance(linear.residual.open(x, 1.0), tanh, 1.5), "i"),
        (lambda: own.advance(own.residual.open(x, 1.0), tanh, 1, causal=True, cut=jnp.zeros(TOKENS)), "cut"),
        (lambda: own(x, [tanh] * 4, progress=1.0, where=Where.whole(1, TOKENS)), "where"),
        (lambda: own(x, [tanh] * 4, progress=1.0, where=jnp.ones((2, TOKENS))), "where"),
    ):
        with pytest.raises(UserError, match=f"{field} = "):
            call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own(x, [tanh] * 4, progress=1.0)
        own(x, [tanh] * 4, progress=1.0, causal=True, cuts=[0.1] * 4)


def test_a_random_router_draws_by_the_noise_of_the_pass():
    own, x = MixtureOfDepths(residual("sandwich", 2), 0.5), jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))
    run = jax.jit(lambda noise: own(x, [tanh] * 2, noise=noise)[1].ran)
    first, second = run(0), run(1)
    assert (first.sum(-1) == TOKENS // 2).all() and not np.array_equal(first, second)
    drawn = jnp.uint32(3_000_000_000)  # as jax.random.bits gives
    np.testing.assert_array_equal(own(x, [tanh] * 2, noise=drawn)[1].ran, run(drawn))
    with pytest.warns(UserWarning, match="noise=step"):
        np.testing.assert_array_equal(own(x, [tanh] * 2)[1].ran, first)


def test_a_branch_says_by_its_methods_what_it_can():
    model = make(find_scheme("plain")(), ModConfig())
    block = jax.tree.map(lambda x: x[0], model.blocks)
    assert isinstance(block.attention.branch, Mixing) and isinstance(Average(), Mixing)
    assert not isinstance(block.mlp.branch, Mixing) and not isinstance(tanh, Mixing)
