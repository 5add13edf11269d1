"""Linen modules are the nnx modules over Linen's parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import nagjax
from nagjax.errors import UserError
from nagjax.residual import registry
from nagjax.residual.module import Residual, module_of
from nagjax.residual.registry import find_scheme, schemes
from tests.own_models import SUBLAYERS, WIDTH
from tests.streams import one_per_stream


class Mixer(nn.Module):
    """Three ways to run the same branches."""

    scheme: str
    way: str = "whole"

    def setup(self):
        self.branches = [nn.Dense(WIDTH) for _ in range(SUBLAYERS)]
        self.residual = getattr(nagjax.linen, find_scheme(self.scheme).__name__)(WIDTH, SUBLAYERS)

    def __call__(self, x):
        if self.way == "whole":
            return self.residual(x, self.branches, progress=0.5)
        stream = self.residual.open(x, 0.5)
        for i, branch in enumerate(self.branches, 1):
            update = branch(self.residual.read(stream, i))
            stream, facts = self.residual.observe(stream, update, i)
            assert facts["turn"].shape == ()
        return self.residual.close(stream)


@pytest.mark.parametrize("name", ["review", *one_per_stream()])
def test_outputs_and_gradients_are_those_of_the_nnx_module(name):
    x = jax.random.normal(jax.random.key(0), (2, 3, WIDTH))
    variables = nn.unbox(Mixer(name).init(jax.random.key(1), x))
    own = module_of(find_scheme(name))(WIDTH, SUBLAYERS, rngs=nnx.Rngs(0))
    graph, state = nnx.split(own)

    def linen_loss(params, way="whole"):
        return jnp.sum(Mixer(name, way).apply({"params": params}, x) ** 3)

    def nnx_loss(params):
        residual = nnx.merge(graph, params["residual"])
        calls = [lambda x, own=params[f"branches_{i}"]: x @ own["kernel"] + own["bias"] for i in range(SUBLAYERS)]
        return jnp.sum(residual(x, calls, progress=0.5) ** 3)

    found = variables["params"].get("residual", {})
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(state)) == jax.tree.map(jnp.shape, found)
    params = variables["params"] | {"residual": found}
    both = jax.jit(lambda params: tuple(jax.value_and_grad(loss)(params) for loss in (linen_loss, nnx_loss)))(params)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4), *both)
    steps = jax.jit(lambda params: linen_loss(params, "steps"))(params)
    np.testing.assert_allclose(steps, both[0][0], rtol=1e-5)


def test_all_methods_are_there():
    public = {name for name, value in vars(Residual).items() if callable(value) and not name.startswith("_")}
    assert {"read", "slot", "slots"} <= public <= {*vars(nagjax.linen.LinenResidual)}


def test_start_values_are_the_schemes_and_boxes_name_axes():
    module = nagjax.linen.NAG(WIDTH, SUBLAYERS, options={"directions": 4, "alpha_power": 1.0})
    variables = module.init(jax.random.key(0), jnp.ones((2, WIDTH)), [jnp.tanh] * SUBLAYERS, progress=1.0)
    np.testing.assert_allclose(nn.unbox(variables)["params"]["gate"]["alpha"], [1, 1 / 2, 1 / 3, 1 / 4], rtol=1e-6)
    specs = nn.get_partition_spec(variables)["params"]["gate"]
    assert specs["weight"] == P(None, "embed", None) and specs["alpha"] == P(None)


class Routed(nn.Module):
    """A residual whose branches run on some of the tokens."""

    scheme: str
    router: str
    decider: str

    def setup(self):
        inner = getattr(nagjax.linen, self.scheme)(WIDTH, SUBLAYERS)
        self.own = nagjax.linen.MixtureOfDepths(inner, 0.5, router=self.router, decider=self.decider)

    def __call__(self, x):
        return self.own(x, [jnp.tanh] * SUBLAYERS, progress=1.0)


@pytest.mark.parametrize("scheme, router, decider", [("NAG", "nag", "threshold"), ("Plain", "linear", "predictor")])
def test_mixture_of_depths_is_the_nnx_module(scheme, router, decider):
    x = jax.random.normal(jax.random.key(0), (2, 8, WIDTH))
    variables = nn.unbox(Routed(scheme, router, decider).init(jax.random.key(1), x))
    own = getattr(nagjax, scheme)(WIDTH, SUBLAYERS, rngs=nnx.Rngs(0))
    routed = nagjax.MixtureOfDepths(own, 0.5, rngs=nnx.Rngs(0), router=router, decider=decider)
    params, graph = dict(variables["params"]["own"]), nnx.graphdef(routed)
    values = {"residual": params.pop("residual"), **params}
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(routed)))
    assert jax.tree.map(jnp.shape, values) == shapes and ("routing" in params) == (router == "linear")

    def linen_loss(values):
        y, done = Routed(scheme, router, decider).apply({"params": {"own": values}}, x)
        return jnp.sum(y**3), done

    def nnx_loss(values):
        y, done = nnx.merge(graph, values)(x, [jnp.tanh] * SUBLAYERS, progress=1.0)
        return jnp.sum(y**3), done

    both = [jax.jit(jax.value_and_grad(loss, has_aux=True))(values) for loss in (linen_loss, nnx_loss)]
    assert both[0][0][1].ran.sum() == SUBLAYERS * 2 * 4
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4), *both)


def test_start_factors_and_options_are_the_nnx_modules():
    module = nagjax.linen.Review(WIDTH, SUBLAYERS)
    assert nagjax.start_factors(module, 2) == nagjax.start_factors("review", 2, SUBLAYERS) == module.start_factors(2)
    x = jnp.ones((2, WIDTH))
    with pytest.raises(UserError, match=r"direction = 3: options of nag: directions, .*ramp"):
        nagjax.linen.NAG(WIDTH, 2, options={"direction": 3}).init(jax.random.key(0), x, [jnp.tanh] * 2, progress=1.0)
    with pytest.warns(UserWarning, match="progress=step") as said:
        nagjax.linen.NAG(WIDTH, 2).init(jax.random.key(0), x, [jnp.tanh] * 2)
    assert said[0].filename == __file__


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_a_mesh_of_any_names_may_be_set(kind):
    """Names of a parameter's axes are looked for in no mesh."""
    module, x = nagjax.linen.NAG(WIDTH, 2), jnp.ones((2, WIDTH))
    branches = [jnp.tanh] * 2
    params = module.init(jax.random.key(0), x, branches, progress=1.0)
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)):
        again = module.init(jax.random.key(0), x, branches, progress=1.0)
        for own in (params, nn.unbox(params), again):
            np.testing.assert_array_equal(
                module.apply(own, x, branches, progress=1.0), module.apply(params, x, branches, progress=1.0)
            )
        nagjax.MixtureOfDepths(nagjax.Plain(WIDTH, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
        nagjax.linen.MixtureOfDepths(nagjax.linen.Plain(WIDTH, 2)).init(
            jax.random.key(0), x[None], branches, progress=1.0
        )


class Scanned(nn.Module):
    """Branches that Linen stacks, and no parameter of the residual among them."""

    @nn.compact
    def __call__(self, x):
        linen = nagjax.linen.NAG(WIDTH, SUBLAYERS)
        residual = linen.residual

        class Step(nn.Module):
            @nn.compact
            def __call__(self, stream, slot):
                return residual.advance(stream, nn.Dense(WIDTH)(residual.read(stream)), slot), None

        scan = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=SUBLAYERS)
        return residual.close(scan()(residual.open(x, 1.0), residual.slots())[0])


def test_in_a_scan_of_linens():
    x = jax.random.normal(jax.random.key(0), (2, WIDTH))
    got, variables = Scanned().init_with_output(jax.random.key(1), x)
    params = nn.unbox(variables)["params"]
    dense = next(own for name, own in params.items() if name != "NAG_0")["Dense_0"]
    residual = nagjax.linen.NAG(WIDTH, SUBLAYERS).bind({"params": params["NAG_0"]})
    branches = [lambda x, i=i: x @ dense["kernel"][i] + dense["bias"][i] for i in range(SUBLAYERS)]
    np.testing.assert_allclose(got, residual(x, branches, progress=1.0), rtol=1e-5, atol=1e-5)


def test_in_linens_vmap_and_in_the_bridge_to_nnx():
    """Which Flax's own boxes refuse without the name of an axis, and without a mesh."""
    x = jax.random.normal(jax.random.key(0), (3, 2, WIDTH))
    each = nn.vmap(Mixer, variable_axes={"params": 0}, split_rngs={"params": True})("nag")
    variables = each.init(jax.random.key(1), x)
    assert nn.get_partition_spec(variables)["params"]["residual"]["gate"]["weight"] == P(None, None, "embed", None)
    got, own = each.apply(variables, x), jax.tree.map(lambda leaf: leaf[1], nn.unbox(variables))
    np.testing.assert_allclose(got[1], Mixer("nag").apply(own, x[1]), rtol=1e-5, atol=1e-5)
    params = nn.unbox(variables["params"])
    training = nagjax.optimizer(optax.sgd(1.0), variables["params"])
    moved, _ = training.update(jax.tree.map(jnp.ones_like, params), training.init(params), params)
    np.testing.assert_allclose(moved["residual"]["gate"]["alpha"], -1 / 12, rtol=1e-6)
    bridged = nnx.bridge.ToNNX(Mixer("nag"), rngs=nnx.Rngs(0)).lazy_init(x)
    again = Mixer("nag").apply({"params": nnx.to_pure_dict(nnx.state(bridged, nnx.Param))}, x)
    np.testing.assert_allclose(bridged(x), again, rtol=1e-5, atol=1e-5)


def test_the_optimizer_of_a_bridged_model_is_that_of_its_parameters():
    x = jax.random.normal(jax.random.key(0), (2, WIDTH))
    bridged = nnx.bridge.ToNNX(Mixer("nag"), rngs=nnx.Rngs(0)).lazy_init(x)
    boxed = Mixer("nag").init(jax.random.key(1), x)["params"]
    params = nnx.to_pure_dict(nnx.state(bridged, nnx.Param))
    training = nagjax.optimizer(optax.adamw(0.1, weight_decay=0.5), boxed)
    moved, _ = training.update(jax.tree.map(jnp.ones_like, params), training.init(params), params)
    own = nnx.Optimizer(bridged, nagjax.optimizer(optax.adamw(0.1, weight_decay=0.5), bridged), wrt=nnx.Param)
    own.update(bridged, jax.tree.map(jnp.ones_like, nnx.state(bridged, nnx.Param)))
    after = nnx.to_pure_dict(nnx.state(bridged, nnx.Param))
    jax.tree.map(lambda *each: np.testing.assert_allclose(*each, atol=1e-6), after, optax.apply_updates(params, moved))


def test_a_module_of_nnx_is_refused():
    own = nagjax.NAG(WIDTH, SUBLAYERS, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="residual = 'NAG': .*nagjax.linen.NAG"):
        nagjax.linen.MixtureOfDepths(own).init(jax.random.key(0), jnp.ones((1, 4, WIDTH)), [jnp.tanh] * SUBLAYERS)


def test_a_scheme_that_is_registered_again_is_the_new_one(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    for start in (0.1, 0.2):
        scheme = type("OfTheTest", (nagjax.Plain.Scheme,), {"name": "of_the_test", "start": start})
        nagjax.register(scheme)
        assert nagjax.OfTheTest.Scheme is nagjax.linen.OfTheTest.Scheme is scheme


def test_every_scheme_is_there_by_its_name():
    assert {scheme.__name__ for scheme in schemes().values()} <= set(dir(nagjax.linen))
    assert nagjax.linen.Review is nagjax.linen.Review and "arXiv:2606.31859" in nagjax.linen.Review.__doc__
    with pytest.raises(AttributeError, match="nagjax.linen has no 'Nag'"):
        nagjax.linen.Nag  # noqa: B018


def test_a_module_that_is_not_bound_says_so():
    with pytest.raises(UserError, match="module = 'NAG': is not bound: call it in init or apply"):
        nagjax.linen.NAG(WIDTH, 2)(jnp.ones((3, WIDTH)), [jnp.tanh] * 2)
    with pytest.raises(UserError, match="module = 'MixtureOfDepths': is not bound: call it in init or apply"):
        nagjax.linen.MixtureOfDepths(nagjax.linen.NAG(WIDTH, 2))(jnp.ones((1, 3, WIDTH)), [jnp.tanh] * 2)
