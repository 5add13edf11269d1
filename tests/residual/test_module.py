"""Schemes as modules around branches of a user's own. That they are the Transformer's schemes: tests/contracts."""

import functools
import inspect
import operator
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nagjax.errors import UserError
from nagjax.residual.module import Residual, as_scheme, module_of, modules, start_factors
from nagjax.residual.registry import schemes
from nagjax.residual.schemes.nag import NAG
from nagjax.runs.config import OptimizerConfig
from nagjax.train.own_model import optimizer
from pallas_kernels import shard_rows, using
from tests.own_models import SUBLAYERS, WIDTH, residual, stacked
from tests.residual.stack import normal
from tests.streams import one_per_stream

STREAMS = pytest.mark.parametrize("name", one_per_stream())


def apart(stack: nnx.Module, sublayers: int = SUBLAYERS) -> list[nnx.Module]:
    return [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(sublayers)]


def close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@STREAMS
def test_scanned_unrolled_and_in_a_scan_of_ones_own_are_the_same(name):
    own, stack, x = residual(name), stacked(), normal(0, 2, 3, WIDTH)

    @jax.jit
    def ways(own, stack, x):
        def step(stream, xs):
            slot, branch = xs
            return own.advance(stream, branch(own.read(stream)), slot), None

        by_slot = jax.lax.scan(step, own.open(x, 0.5), (own.slots(), stack))[0]

        def numbered(stream, xs):
            i, branch = xs
            return own.advance(stream, branch(own.read(stream, i)), i), None

        by_number = jax.lax.scan(numbered, own.open(x, 0.5), (jnp.arange(1, SUBLAYERS + 1), stack))[0]
        once, facts = own(x, stack, progress=0.5, observe=True, remat=True)
        return own(x, apart(stack), progress=0.5), (once, own.close(by_slot), own.close(by_number)), facts

    want, others, facts = ways(own, stack, x)
    assert want.shape == x.shape and np.std(want) > 0.1
    for got in others:
        close(got, want)
    assert all(values.shape == (SUBLAYERS,) for values in facts.values())


@pytest.mark.parametrize("name", ["nag", "hyper_connections"])
@pytest.mark.parametrize("lead", [(), (6,), (1, 2, 3)], ids=str)
def test_any_axes_in_front_of_the_features(name, lead):
    """A branch gets the same shape as x."""
    own, stack, x = residual(name), stacked(), normal(0, 6, WIDTH)
    seen = []
    whole = own(x, apart(stack), progress=1.0)
    rows = x[: int(np.prod(lead))].reshape(*lead, WIDTH)
    branches = [lambda x, branch=branch: (seen.append(x.shape), branch(x))[1] for branch in apart(stack)]
    got = own(rows, branches, progress=1.0)
    close(got, whole[: int(np.prod(lead))].reshape(*lead, WIDTH))
    assert seen == [rows.shape] * SUBLAYERS


@STREAMS
def test_gradients_are_finite_reach_everything_and_agree(name):
    own, stack, x, target = residual(name), stacked(), normal(0, 2, 3, WIDTH), normal(1, 2, 3, WIDTH)
    own.gate = jax.tree.map(lambda leaf: leaf + 0.1, own.gate)  # ReZero's start lets no gradient through

    def loss(models, scanned):
        own, stack = models
        out = own(x, stack if scanned else apart(stack), progress=1.0)
        return jnp.mean((out - target) ** 2)

    gradient = jax.jit(nnx.grad(loss), static_argnums=1)
    unrolled, scanned = gradient((own, stack), False), gradient((own, stack), True)
    jax.tree.map(lambda got, want: close(got, want, 1e-4), scanned, unrolled)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(unrolled))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(unrolled[1]))


def test_vmap_split_merge_and_a_copy_by_pickle():
    own, stack, x = residual(), stacked(), normal(0, 5, 3, WIDTH)
    want = own(x, stack, progress=1.0)
    close(jax.vmap(lambda row: own(row, stack, progress=1.0))(x), want)
    graph, state = nnx.split((own, stack))
    again = jax.jit(lambda state, x: (lambda m: m[0](x, m[1], progress=1.0))(nnx.merge(graph, state)))
    close(again(state, x), want)
    same = residual()
    same.start_factors(1)
    assert nnx.split(same)[0] == nnx.split(residual())[0] and hash(nnx.split(same)[0]) == hash(nnx.split(own)[0])
    assert pickle.loads(pickle.dumps(NAG(directions=3))) == NAG(directions=3)
    seeds = nnx.vmap(lambda rngs: residual_of(rngs))(nnx.Rngs(0).split(3))
    assert jax.tree.leaves(seeds.gate)[0].shape[0] == 3


def residual_of(rngs: nnx.Rngs) -> Residual:
    return module_of(NAG)(WIDTH, SUBLAYERS, rngs=rngs)


@pytest.mark.parametrize("name", ["nag", "plain"])
def test_on_a_mesh_as_on_one_device(name):
    own, stack, x = residual(name), stacked(), jnp.asarray(normal(0, 8, 3, WIDTH))
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))

    def gradient(models, x):
        return nnx.grad(lambda models: jnp.mean(models[0](x, models[1], progress=1.0) ** 3))(models)

    want = jax.jit(gradient)((own, stack), x)
    split = jax.device_put(x, NamedSharding(mesh, P("data")))
    got = jax.jit(shard_rows(gradient, mesh, "data"))(jax.device_put((own, stack), NamedSharding(mesh, P())), split)
    jax.tree.map(lambda got, want: close(got, want, 1e-5), got, want)


@pytest.mark.parametrize("name", ["nag", "review", "plain"])
def test_one_fused_kernel_for_each_boundary(name):
    own, x = residual(name, sublayers=5), jnp.zeros((4, 8, WIDTH))

    def forward(own, x):
        with using("mosaic_tpu"):
            return own(x, [jnp.tanh] * 5, progress=1.0)

    text = jax.jit(forward).trace(own, x).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 5


def test_stacked_kinds_take_turns():
    own, kinds, x = residual("plain"), [stacked(1, 2), stacked(2, 2)], normal(0, 3, WIDTH)
    order = [branch for pair in zip(*(apart(kind, 2) for kind in kinds), strict=True) for branch in pair]
    close(own(x, kinds), own(x, order))


def test_a_scan_carries_what_stacked_branches_keep():
    """Dropout's keys: another mask at each call, none shared by two sublayers."""

    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(jnp.ones_like(x))

    stack = nnx.vmap(Dropped)(nnx.Rngs(0).split(SUBLAYERS))
    own, x = residual("rezero"), jnp.zeros((64, WIDTH))
    own.gate.value[...] = 4.0 ** jnp.arange(SUBLAYERS)
    first, second = own(x, stack), own(x, stack)
    masks = [(np.asarray(first).astype(int) // (2 * 4**i)) % 4 for i in range(SUBLAYERS)]
    assert all(0.4 < mask.mean() < 0.6 for mask in masks) and not np.array_equal(masks[0], masks[1])
    assert not np.array_equal(first, second)


def test_stacked_branches_in_evaluation_may_come_from_outside_a_transformation():
    class Kept(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    stack, own, x = nnx.vmap(Kept)(nnx.Rngs(0).split(SUBLAYERS)), residual("plain"), normal(0, 2, 3, WIDTH)
    own(x, stack)
    assert (stack.dropout.rngs.count[...] == 1).all() and np.abs(stack.norm.mean[...]).min() > 0
    stack.eval()
    before = jax.tree.leaves(nnx.state(stack, nnx.Not(nnx.Param)))
    want = own(x, stack)
    close(jax.jit(lambda x: own(x, stack))(x), want)
    close(jax.vmap(lambda row: own(row, stack, remat=True))(x), want)
    assert all(map(operator.is_, before, jax.tree.leaves(nnx.state(stack, nnx.Not(nnx.Param)))))


def test_in_a_scan_of_nnx_that_gets_the_module_and_its_slots():
    own, stack, x = residual(), stacked(), normal(0, 2, WIDTH)

    @nnx.scan(in_axes=(nnx.Carry, None, 0, 0), out_axes=nnx.Carry)
    def step(stream, own, branch, slot):
        return own.advance(stream, branch(own.read(stream)), slot)

    close(own.close(step(own.open(x, 1.0), own, stack, own.slots())), own(x, stack, progress=1.0))


@pytest.mark.parametrize("name", ["nag", "prores"])
@pytest.mark.parametrize("progress", [-0.1, 7, np.nan, "0.5", np.ones(1), jnp.ones((3, 1))], ids=str)
def test_a_progress_that_is_no_share_is_refused(name, progress):
    with pytest.raises(UserError, match="progress = .*step / steps"):
        residual(name)(jnp.ones((2, 3, WIDTH)), [jnp.tanh] * SUBLAYERS, progress=progress)
    with pytest.raises(UserError, match="progress = "):
        jax.jit(lambda p: residual(name).open(jnp.ones((2, 3, WIDTH)), p))(jnp.ones((2, 1)))


@pytest.mark.parametrize("progress", [0, 1, np.float64(0.5), jnp.bfloat16(0.5), nnx.Param(jnp.float32(1.0))], ids=str)
def test_numbers_that_may_be_a_progress(progress):
    assert residual().open(jnp.ones((2, WIDTH)), progress).progress.dtype == jnp.float32


@pytest.mark.parametrize("i", [0, -1, SUBLAYERS + 1, np.int64(0), jnp.int32(0), 1.0, "1"])
def test_a_sublayer_that_is_not_there_is_refused(i):
    own = residual()
    stream = own.open(jnp.ones((2, WIDTH)), 1.0)
    for use in (lambda: own.advance(stream, jnp.ones((2, WIDTH)), i), lambda: own.read(stream, i)):
        with pytest.raises(UserError, match="i = "):
            use()
    for of in (own, "deepnorm"):
        with pytest.raises(UserError, match="i = "):
            start_factors(of, i, SUBLAYERS)


def test_what_does_not_fit_is_refused():
    own, x = residual(), jnp.ones((2, WIDTH))
    for call, field in (
        (lambda: own(jnp.ones((2, WIDTH + 1)), [jnp.tanh] * 4, progress=1.0), "x"),
        (lambda: own(x, [jnp.tanh] * 3, progress=1.0), "branches"),
        (lambda: own(x, stacked(sublayers=3), progress=1.0), "branches"),
        (lambda: own(x, [], progress=1.0), "branches"),
        (lambda: own(x, jnp.tanh, progress=1.0), "branches"),
        (lambda: own(x, [lambda x: x[:1]] * 4, progress=1.0), "update"),
        (lambda: residual("rezero")(x, [lambda x: x[..., :1]] * 4), "update"),
        (lambda: own(x, [lambda x: (x, x)] * 4, progress=1.0), "update"),
        (lambda: own(x, [lambda x: 1j * x] * 4, progress=1.0), "update = 'complex64'"),
        (lambda: residual("plain")(x, [lambda x: jnp.ones(x.shape, int)] * 4), "update = 'int32'"),
        (lambda: own(x.astype(int), [jnp.tanh] * 4, progress=1.0), "x"),
        (lambda: own(x, [jnp.tanh] * 4, progress=1.0, remat=True), "remat"),
        (lambda: own(x, [jnp.tanh, None] * 2, progress=1.0), "branches"),
        (lambda: own.logits(own.open(x, 1.0), jnp.ones((WIDTH, 5))), "table"),
        (lambda: own.logits(own.open(x, 1.0), jnp.ones(WIDTH)), "table"),
        (lambda: module_of(NAG)(WIDTH, 2, rngs=jax.random.key(0)), "rngs"),
        (lambda: optimizer(1e-3, own), "tx"),
        (lambda: optimizer(optax.adam(1e-3), own, steps=100), "steps"),
        (lambda: optimizer(OptimizerConfig(), own, steps=0), "steps"),
        (lambda: residual(sublayers=0), "sublayers"),
        (lambda: residual(sublayers=True), "sublayers"),
        (lambda: residual(embedding_std=0.0), "embedding_std"),
        (lambda: residual(direction=3), "direction"),
        (lambda: start_factors("deepnorm", 1), "sublayers"),
        (lambda: start_factors("deepnorm", 1, "4"), "sublayers"),
        (lambda: start_factors(residual("review"), 1, 99), "sublayers"),
        (lambda: as_scheme(3), "scheme"),
    ):
        with pytest.raises(UserError, match=field if " = " in field else f"{field} = "):
            call()


def test_what_is_no_list_of_branches_is_named_with_what_to_do():
    linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    for sublayers, given, said in (
        (SUBLAYERS, linear, r"'Linear'.* not stacked: put it into a list of 4 callables.*nnx\.vmap"),
        (1, linear, "'Linear'.* not stacked: put it into a list of 1$"),
        (SUBLAYERS, jnp.tanh, "one branch .*: put it into a list"),
        (SUBLAYERS, nnx.Sequential(*[linear] * SUBLAYERS), r"'Sequential'.*: give its layers, model\.layers"),
        (SUBLAYERS, (linear for _ in range(SUBLAYERS)), r"'generator'.*: give list\(branches\)"),
        (SUBLAYERS, [linear] * 3, "3 of them.*: give 4 callables"),
    ):
        with pytest.raises(UserError, match=f"branches = .*{said}"):
            residual("plain", sublayers)(jnp.ones((2, WIDTH)), given)


def test_sizes_and_rows_of_numpy():
    own = Residual("plain", np.int64(WIDTH), np.int32(2), rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((3, WIDTH))
    close(own(x, [jnp.tanh] * 2), own(jnp.asarray(x, jnp.float32), [jnp.tanh] * 2))


def test_what_training_needs_and_nobody_gave_is_said():
    x, branches = jnp.ones((2, WIDTH)), [jnp.tanh] * SUBLAYERS
    with pytest.warns(UserWarning, match=r"progress=step / steps .*ramp=0") as said:
        residual()(x, branches)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        residual()(x, branches, progress=0.3)
        residual(ramp=0.0)(x, branches)
        residual("review")(x, branches)


@pytest.mark.parametrize("sublayers", [1, 5])
@pytest.mark.parametrize("name", schemes())
def test_of_an_odd_number_of_sublayers_each_counts(name, sublayers):
    own, x, weights = residual(name, sublayers), normal(0, 2, WIDTH), normal(1, 2, WIDTH)
    own.gate = jax.tree.map(lambda leaf: leaf + 0.1, own.gate)  # ReZero's start lets nothing through

    @jax.jit
    @jax.value_and_grad
    def loss(offsets):
        return jnp.sum(own(x, [lambda x, b=b: jnp.tanh(x) + b for b in offsets], progress=1.0) * weights)

    value, gradient = loss(normal(2, sublayers, WIDTH))
    assert np.isfinite(value) and np.isfinite(gradient).all() and np.abs(gradient).max(axis=1).min() > 1e-6


@pytest.mark.parametrize("name", ["rezero", "rezero_prenorm", "nag", "prores"])
def test_telemetry_has_a_gradient_where_sublayers_do_nothing(name):
    own, x = residual(name), normal(0, 2, WIDTH)

    def total(own):
        facts = own(x, [jnp.tanh] * SUBLAYERS, progress=0.0, observe=True)[1]
        return sum(map(jnp.sum, facts.values())), facts

    gradient, facts = jax.jit(jax.grad(total, has_aux=True))(own)
    assert np.max(facts["ratio"]) < 1e-6 and np.max(facts["turn"]) < 1e-6
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("name", ["nag", "plain"])
def test_rows_of_zeros_do_not_count_in_telemetry(name):
    own, x = residual(name, 2), jnp.asarray(normal(0, 5, WIDTH))

    @jax.jit
    def facts(x):
        branches = [lambda x: x * (1.0 + jnp.arange(WIDTH)) + 1e4 * (x == 0)] * 2
        return {name: of[0] for name, of in own(x, branches, progress=1.0, observe=True)[1].items()}

    whole = jnp.concatenate([x, 0.0 * x])
    jax.tree.map(close, facts(whole), facts(x))
    assert np.isfinite(jax.grad(lambda x: sum(facts(x).values()))(whole)).all()
    assert not any(facts(0.0 * x).values())


@pytest.mark.parametrize("name", schemes())
def test_parameters_in_bfloat16(name):
    """Those of the scheme are widened where they are used. Few go one by one: a scan is traced once for all of them."""
    own, stack, x = residual(name), stacked(), normal(0, 2, 3, WIDTH)

    @functools.partial(jax.jit, static_argnums=2)
    def run(models, x, scanned):
        own, stack = models
        out, facts = own(x, stack if scanned else apart(stack), progress=0.5, observe=True)
        return jnp.sum(out.astype(jnp.float32)), (out, facts)

    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (own, stack))
    step, low = jax.value_and_grad(run, has_aux=True), x.astype(jnp.bfloat16)
    for rows, scanned in ((x, True), (low, True), *([(low, False)] if name in one_per_stream() else [])):
        (_, (out, facts)), gradient = jax.eval_shape(lambda m, r, s=scanned: step(m, r, s), narrow, rows)
        assert out.dtype == rows.dtype and {fact.dtype for fact in facts.values()} == {jnp.dtype(jnp.float32)}
        assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.bfloat16)}
    if name in ("nag", "review", "lns"):
        close(run(narrow, x, False)[1][0], run((own, stack), x, False)[1][0], 0.05)


@pytest.mark.parametrize("name", schemes())
def test_with_64_bit_types(name):
    start, x = jax.tree.leaves(residual(name)), normal(0, 2, 3, WIDTH)
    with jax.enable_x64(True):
        own, stack = residual(name), stacked()
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(own), start)
        assert {leaf.dtype for leaf in jax.tree.leaves(own)} <= {jnp.dtype(jnp.float32)}
        one_by_one = [(jnp.float32, apart(stack))] if name in one_per_stream() else []
        for dtype, branches in ((jnp.float32, stack), (jnp.float64, stack), *one_by_one):
            run = lambda own, x, b=branches: own(x, b, progress=0.5, observe=True)  # noqa: E731
            out, facts = jax.eval_shape(run, own, jnp.asarray(x, dtype))
            assert out.dtype == dtype and {fact.dtype for fact in facts.values()} == {jnp.dtype(jnp.float32)}


def test_start_factors_are_the_schemes():
    assert start_factors("deepnorm", 3, 8) == pytest.approx(((8 * 4) ** -0.25,) * 2)
    assert start_factors(residual("review"), 2) == (SUBLAYERS**-0.5, 1.0)
    assert start_factors(NAG, 1, 2) == (1.0, 1.0)
    by_depth = jax.vmap(lambda i: start_factors("depth_scaled", i, 8).output)(jnp.arange(1, 9))
    assert by_depth.shape == (8,) and by_depth[0] > by_depth[-1]


def test_modules_are_documented_named_and_known_by_any_of_their_names():
    found = modules()
    assert {"NAG", "Review", "LNS", "Plain", "ReZero"} <= found.keys() and len(found) == len(schemes())
    own = found["NAG"]
    assert own.__name__ == "NAG" and own.__module__ == "nagjax" and issubclass(own, Residual) and own.Scheme is NAG
    assert "arXiv:2606.16112" in own.__doc__ and "count from 1" in own.__doc__
    assert list(inspect.signature(own).parameters)[-3:] == ["directions", "alpha_power", "ramp"]
    for given in ("nag", NAG, NAG(), own, residual()):
        assert as_scheme(given) == NAG()
    assert Residual("nag", WIDTH, 2, rngs=nnx.Rngs(0)).scheme == NAG()


def test_a_few_steps_with_an_own_optax_chain():
    own, stack, x, target = residual("review"), stacked(), normal(0, 8, WIDTH), normal(1, 8, WIDTH)
    training = nnx.Optimizer((own, stack), optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(models, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m[0](x, m[1]) - target) ** 2))(models)
        optimizer.update(models, grads)
        return loss

    losses = [float(step((own, stack), training)) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
