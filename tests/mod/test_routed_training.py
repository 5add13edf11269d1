"""What training adds: gradients through the router, average cuts, and the deciders' own losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nagjax.layers.where import Where
from nagjax.mod import ModConfig
from nagjax.mod.routed import ForwardContext, Site
from nagjax.mod.routers import routers
from nagjax.residual import Boundary
from nagjax.residual.registry import find_scheme, schemes
from nagjax.runs.config import RunConfig
from nagjax.train.distributed.mesh import batch_sharding
from nagjax.train.step import jit_train_step
from tests import meshes, tiny
from tests.mod.routing_models import make
from tests.tolerance import assert_close

HALF = ModConfig(rate=(0.5,))


def config(name="nag", mod=HALF, **options):
    return tiny.run_config(find_scheme(name)(), mod=mod, **options)


def distinct_batch(seed: int):
    """No token occurs twice in a row: equal tokens tie, and rounding would decide which of them runs."""
    batch = tiny.packed_batch(seed)
    noise = np.random.default_rng(seed)
    rows = [noise.permutation(tiny.VOCAB)[: tiny.TOKENS] for _ in range(tiny.BATCH)]
    return batch._replace(tokens=np.array(rows, np.int32))


@functools.cache
def step_of(config: RunConfig, mesh=(1, 1, 1)):
    return jit_train_step(tiny.blueprint(config, *mesh))


@functools.cache
def start(config: RunConfig):
    """A state in which no gradient is nothing but rounding."""
    state = jax.device_get(tiny.fresh(tiny.blueprint(config)))
    return state._replace(params=jax.device_get(tiny.moved(state.params)))


@functools.cache
def losses(config: RunConfig, mesh=(1, 1, 1), steps: int = 3):
    """Loss and gradient norm of a few steps, and the state behind them."""
    state = start(config)
    bp = tiny.blueprint(config, *mesh)
    state, step, seen = jax.device_put(state, bp.shardings()), step_of(config, mesh), []
    for seed in range(steps):
        state, metrics = step(state, jax.device_put(distinct_batch(seed), batch_sharding(bp.mesh)))
        seen.append((float(metrics.loss), float(metrics.grad_norm)))
    assert step._cache_size() == 1
    return np.array(seen), jax.device_get(state)


PREDICTED = config("plain", ModConfig(rate=(0.5,), decider="predictor", aux_weight=1.0))
FEW = ("nag-tensor", "plain-data", "denseformer-tensor")  # streams of every layout are on meshes in tests/contracts
PAIRS = meshes.pairs(schemes(), ("data", "fsdp", "tensor"), (), ("data", "fsdp", "tensor"))
PAIRS = [pair for pair in PAIRS if meshes.EVERY or pair.id in FEW]


@pytest.mark.parametrize("name, mesh", PAIRS)
def test_any_mesh_gives_the_losses_of_one_device(name, mesh):
    """Two steps: later a rounding may let another token in, which is another model."""
    changes = {"lns": {"kv": "selected"}}.get(name, {})
    own = PREDICTED if name == "plain" else config(name, ModConfig(rate=(0.5,), **changes))
    alone, together = losses(own, steps=2), losses(own, mesh, steps=2)
    for got, want in zip(together[0].T, alone[0].T, strict=True):
        assert_close(got, want, **tiny.steps(2))
    assert_close(together[1].mod["cuts"], alone[1].mod["cuts"], **tiny.steps(2))


@pytest.mark.parametrize("change", [{"remat": "block"}, {"train": {"accumulate": 4}}], ids=str)
def test_rematerialisation_and_accumulation_change_nothing(change):
    usual, other = losses(config()), losses(config(**change))
    for got, want in zip(other[0].T, usual[0].T, strict=True):
        assert_close(got, want, **tiny.steps(3))
    assert_close(other[1].mod["cuts"], usual[1].mod["cuts"], **tiny.steps(3))


def test_cuts_are_a_moving_average_that_starts_at_the_first():
    """What the first of all steps finds becomes the cuts; so a step that is told of none before it says what it found,
    which is what the model does: tests/mod/test_ragged.py."""
    own = config()
    first, before, after = (losses(own, steps=steps)[1] for steps in (1, 2, 3))
    assert np.all(start(own).mod["cuts"] == -np.inf) and np.all(np.isfinite(first.mod["cuts"]))
    alone = before._replace(mod={"cuts": np.full_like(before.mod["cuts"], -np.inf)})
    seen = step_of(own)(jax.device_put(alone, tiny.blueprint(own).shardings()), distinct_batch(2))[0].mod["cuts"]
    decay = 2 / 12
    assert_close(after.mod["cuts"], decay * before.mod["cuts"] + (1 - decay) * np.asarray(seen), **tiny.FORWARD)
    assert np.abs(np.asarray(seen) - before.mod["cuts"]).max() > 1e-3


def test_the_predictor_does_not_touch_the_language_model():
    """Its loss has gradients of its own parameters alone, and a step moves them."""
    bp, state = tiny.blueprint(PREDICTED), start(PREDICTED)
    was, own = (s.params["blocks"]["mlp"]["routing"]["decider"] for s in (state, losses(PREDICTED, steps=2)[1]))
    assert np.any(own["bias"] != np.asarray(was["bias"]))

    def loss(params, batch):
        return jnp.mean(bp.model(params)(batch.tokens, batch.where).routing["loss"])

    grads = jax.jit(jax.grad(loss))(state.params, tiny.packed_batch())
    touched = {
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if np.any(np.asarray(leaf) != 0)
    }
    assert touched and all("decider" in name for name in touched)


@pytest.mark.parametrize("router", [name for name, own in routers().items() if own.judges])
def test_the_auxiliary_loss_trains_the_router(router):
    mod = ModConfig(rate=(0.5,), router=router, decider="aux_loss", aux_weight=1.0)
    bp = tiny.blueprint(config("plain", mod))
    batch = tiny.packed_batch()

    def loss(params):
        return jnp.mean(bp.model(params)(batch.tokens, batch.where).routing["loss"])

    params, falling = bp.init(0).params, []
    optimizer = optax.adam(0.03)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    for _ in range(30):
        params, state, value = step(params, state)
        falling.append(float(value))
    assert falling[-1] < 0.6 * falling[0]


@pytest.mark.parametrize("name, router", [("nag", "auto"), ("plain", "auto"), ("plain", "skip_class")])
def test_the_routers_gradient_against_finite_differences(name, router):
    """One routed sublayer, at a point where a small step changes no choice."""
    model = make(find_scheme(name)(), ModConfig(rate=(0.5,), router=router))
    block = jax.tree.map(lambda x: x[1], model.blocks)
    own, where = block.mlp, Where.whole(2, 8)
    embedding, target = jax.random.normal(jax.random.key(3), (2, 2, 8, model.config.width))
    graph, params = nnx.split(own)
    params = nnx.to_pure_dict(params)
    router = params["gate"] if name == "nag" else params["routing"]["router"]

    @jax.jit
    def value(weight):
        own = nnx.merge(graph, _replaced(params, router, weight))
        at = Boundary(
            own.gate, block.attention.entry, jnp.int32(4), jnp.int32(5), jnp.float32(1.0), model.config.sublayers
        )
        stream = model.scheme.open(embedding, at._replace(gate=None), model.ends)
        site = Site(own.branch, own.routing, at, jnp.float32(0.0), 0.5)
        (result,) = model.mod.run(stream, (site,), None, ForwardContext(where, jnp.float32(1.0), jnp.uint32(0), False))
        return jnp.sum(target * model.scheme.lanes(result.stream)[0]), result.ran

    weight = router["weight"]
    gradient, ran = jax.jit(jax.grad(value, has_aux=True))(weight)
    direction, step = gradient / jnp.linalg.norm(gradient), 0.02
    (up, ran_up), (down, ran_down) = value(weight + step * direction), value(weight - step * direction)
    assert np.array_equal(ran, ran_up) and np.array_equal(ran, ran_down)
    slope = float((up - down) / (2 * step))
    assert slope > 0.1
    np.testing.assert_allclose(jnp.sum(gradient * direction), slope, rtol=5e-3)


def _replaced(params: dict, router: dict, weight) -> dict:
    """The parameters with another router weight."""
    changed = router | {"weight": weight}
    return jax.tree.map(lambda p: changed if p is router else p, params, is_leaf=lambda p: p is router)


def test_training_config_reaches_the_model():
    assert tiny.blueprint(config()).model(start(config()).params).config.mod == HALF
