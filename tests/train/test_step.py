"""One training step: what it differentiates, in how many parts, and where the state lives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nagjax.errors import UserError
from nagjax.mod.config import ModConfig
from nagjax.residual import find_scheme
from nagjax.runs.config import MeshConfig, RunConfig, differences, from_dict, to_dict
from nagjax.train.distributed.mesh import batch_sharding, make_mesh, parameter_sharding
from nagjax.train.loss import cross_entropy
from nagjax.train.step import jit_eval_step, jit_train_step
from tests import tiny
from tests.tolerance import assert_close

NAG, PLAIN = find_scheme("nag")(), find_scheme("plain")()


def test_cross_entropy():
    batch = tiny.packed_batch()
    logits = 3.0 * np.random.default_rng(0).standard_normal((8, 8, 32)).astype(np.float32)
    got = cross_entropy(jnp.asarray(logits), batch)
    x, w = logits.astype(float), batch.weights
    log_z = np.log(np.sum(np.exp(x), -1))
    nats = log_z - np.take_along_axis(x, batch.targets[..., None], -1)[..., 0]
    want = np.sum(w * nats), np.sum(w * log_z**2), np.sum(w), np.sum(w * (np.argmax(x, -1) == batch.targets))
    assert_close(got, want, terms=64, chain=2)
    assert 0 < got.count < 64


def test_accumulation_in_parts_is_the_gradient_of_the_whole():
    """On two devices, in four parts that hold different numbers of targets."""
    batch, params = tiny.packed_batch(3), tiny.moved(tiny.created(PLAIN).params)
    one = tiny.blueprint(tiny.run_config(PLAIN))

    def loss(params):
        model = one.model(params)
        sums = cross_entropy(model.logits(model(batch.tokens, batch.where)), batch)
        return (sums.nats + 0.1 * sums.z) / sums.count, sums

    (_, sums), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    train = {"accumulate": 4, "z_loss": 0.1}
    bp = tiny.blueprint(tiny.run_config(PLAIN, train=train, optimizer={"clip": 0.0}), data=2)
    state = jax.device_get(tiny.created(PLAIN)._replace(step=jnp.int32(50), params=params))
    state = jax.device_put(state, bp.shardings())
    state, metrics = jit_train_step(bp)(state, jax.device_put(batch, batch_sharding(bp.mesh)))
    moment = optax.tree_utils.tree_get(state.optimizer, "mu")
    assert_close(moment, jax.tree.map(lambda g: 0.1 * g, grads), **tiny.STEP)
    assert_close(metrics.loss, sums.nats / sums.count, **tiny.FORWARD)
    assert_close(metrics.accuracy, sums.correct / sums.count, terms=64)
    assert_close(metrics.grad_norm, optax.tree.norm(grads), **tiny.STEP)
    assert metrics.count == batch.weights.sum() and int(state.step) == 51


@pytest.mark.parametrize("mod", [{"rate": (0.5,)}, {"rate": (0.5,), "capacity": "adaptive"}])
def test_an_evaluation_in_parts_is_that_of_the_whole(mod):
    """On two devices, in four parts that hold different numbers of targets; with a row of padding alone."""
    batch = tiny.packed_batch(3)
    empty = jax.tree.map(lambda x: np.concatenate([x[:-1], np.zeros_like(x[:1])]), batch)
    found = []
    for parts in (1, 4):
        bp = tiny.blueprint(tiny.run_config(NAG, train={"accumulate": parts}, mod=ModConfig(**mod)), data=2)
        state = tiny.fresh(bp)
        params = jax.device_put(tiny.moved(jax.device_get(state.params)), bp.parameter_shardings())
        cuts = {name: jnp.full_like(x, 0.25) for name, x in state.mod.items()}
        rows = jax.device_put(empty, batch_sharding(bp.mesh))
        causal = bp.config.model.mod.adaptive
        found.append(jit_eval_step(bp, causal=causal)(params, cuts, jnp.int32(9), rows, jnp.ones(tiny.VOCAB)))
    whole, parts = jax.device_get(found)
    assert parts.sums.count == whole.sums.count > 0 and parts.tokens == whole.tokens and parts.bytes == whole.bytes
    assert_close(parts.sums, whole.sums, **tiny.FORWARD)
    assert_close(parts.telemetry, whole.telemetry, **tiny.FORWARD)
    names = {"executed", "agreement"} & whole.routing.keys()
    assert names and 0.0 < np.mean(whole.routing["executed"]) < 1.0
    assert_close(*({name: own.routing[name] for name in names} for own in (parts, whole)), **tiny.FORWARD)


def test_an_evaluation_in_parts_gives_every_device_its_rows():
    """Four devices of a run that trained on one, in four parts of two rows."""
    config = tiny.run_config(PLAIN, train={"batch": 8, "accumulate": 4})
    batch, found = tiny.packed_batch(batch=8), []
    for fsdp in (1, 4):
        bp = tiny.blueprint(config, fsdp=fsdp)
        rows = jax.device_put(batch, batch_sharding(bp.mesh))
        params = jax.device_put(tiny.moved(jax.device_get(tiny.fresh(bp).params)), bp.parameter_shardings())
        found.append(jit_eval_step(bp)(params, {}, jnp.int32(0), rows, jnp.ones(tiny.VOCAB)).sums)
    assert_close(*found, **tiny.FORWARD)


def test_an_evaluation_needs_no_more_memory_than_a_step():
    def temporary(parts):
        bp = tiny.blueprint(tiny.run_config(PLAIN, train={"batch": 64, "accumulate": parts}, context=64, remat="block"))
        batch = jax.tree.map(jnp.asarray, tiny.packed_batch(batch=64, tokens=64))
        state = bp.abstract()
        table = jax.ShapeDtypeStruct((tiny.VOCAB,), jnp.float32)
        compiled = jit_eval_step(bp).lower(state.params, {}, state.step, batch, table).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16) < temporary(1) / 4


def test_a_random_router_draws_anew_for_every_part():
    """Of the same row in two parts other tokens skip: the loss is not that of the row with a part of padding."""
    mod, row = ModConfig(rate=(0.5,), router="random"), jax.tree.map(lambda x: x[:1], tiny.packed_batch())
    bp = tiny.blueprint(tiny.run_config(PLAIN, train={"batch": 2, "accumulate": 2}, mod=mod, depth=2))
    start = jax.device_get(tiny.fresh(bp))
    start, step, losses = start._replace(params=tiny.moved(start.params)), jit_train_step(bp), []
    for other in (row, jax.tree.map(np.zeros_like, row)):
        batch = jax.tree.map(lambda *parts: np.concatenate(parts), row, other)
        _, metrics = step(jax.device_put(jax.device_get(start), bp.shardings()), batch)
        losses.append(float(metrics.loss))
    assert abs(losses[0] - losses[1]) > 1e-4


def test_a_stream_kept_on_the_host_changes_nothing():
    """Two steps on two devices: what is read back from the host is what was written."""
    bp = tiny.blueprint(tiny.run_config(NAG, remat="offload"), data=2)
    state, step = jax.device_put(tiny.start(NAG), bp.shardings()), jit_train_step(bp)
    for seed, want in enumerate(tiny.trained(NAG)[0][:2]):
        state, metrics = step(state, jax.device_put(tiny.packed_batch(seed), batch_sharding(bp.mesh)))
        assert_close((metrics.loss, metrics.grad_norm), want, **tiny.steps(2))


def test_the_state_is_born_sharded_with_the_same_values():
    bp = tiny.blueprint(tiny.run_config(NAG), 2, 2, 2)
    state = bp.create()
    assert np.isnan(state.guard.losses).all()  # no step has been taken
    compared = (each._replace(guard=each.guard._replace(losses=())) for each in (state, tiny.created(NAG)))
    for one, other in zip(*map(jax.tree.leaves, jax.device_get(tuple(compared))), strict=True):
        assert_close(one, other, terms=1, chain=4)  # the same numbers by two programs: a factor may round otherwise
    up = state.params["blocks"]["mlp"]["branch"]["up"]
    assert up.sharding.shard_shape(up.shape) == (3, 8, up.shape[2] // 2)
    moment = optax.tree_utils.tree_get(state.optimizer, "nu")["blocks"]["mlp"]["branch"]["up"]
    assert moment.sharding == up.sharding


def test_seeds_differ():
    config = tiny.run_config(NAG, train={"seed": 1})
    other = tiny.blueprint(config).create()
    same = tiny.created(NAG)
    assert np.any(np.asarray(other.params["head"]["tokens"]) != same.params["head"]["tokens"])
    assert np.any(np.asarray(other.rng) != same.rng)


def test_sharding_rules():
    mesh = make_mesh(MeshConfig(2, 2, 2))

    def spec(axes, shape):
        return tuple(parameter_sharding(mesh, axes, shape).spec)

    assert spec(("embed", "mlp"), (5, 16, 48)) == (None, "fsdp", "tensor")
    assert spec(("embed", "mlp"), (5, 15, 48)) == (None, None, "tensor")  # 15 is not to be halved
    assert spec(("vocab", "embed"), (257, 16)) == (None, "fsdp")
    assert spec((None, "embed", None), (2, 16, 3)) == (None, "fsdp", None)
    assert spec((), ()) == ()


@pytest.mark.parametrize(
    "wrong, given, most, axis",
    [
        (MeshConfig(data=3, fsdp=3), "data 3 x fsdp 3", "at most", "data"),
        (MeshConfig(fsdp=3), "fsdp 3", "a divisor of", "fsdp"),
        (MeshConfig(fsdp=2, tensor=16), "fsdp 2 x tensor 16", "a divisor of", "tensor"),
        (MeshConfig(data=2, tensor=16), "data 2 x tensor 16", "at most", "tensor"),
    ],
)
def test_a_mesh_that_does_not_fit(wrong, given, most, axis):
    words = f"mesh = '{given}': their product has to be {most} 8, the number of devices: change --mesh.{axis}"
    with pytest.raises(UserError, match=words):
        make_mesh(wrong)
    with pytest.raises(UserError, match="at least 1"):
        MeshConfig(tensor=0)


def test_mesh_uses_what_it_is_given():
    assert dict(make_mesh(MeshConfig()).shape) == {"data": 8, "fsdp": 1, "expert": 1, "tensor": 1, "sequence": 1}
    assert tuple(make_mesh(MeshConfig(tensor=2, sequence=2)).shape.values()) == (2, 1, 1, 2, 2)
    assert make_mesh(MeshConfig(data=1)).size == 1


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"context": 10}, "context"),
        ({"mod": ModConfig(rate=(0.5,))}, "mesh.sequence"),
        ({"attention": "cudnn"}, "attention"),
    ],
)
def test_sequences_that_cannot_be_split(changes, field):
    with pytest.raises(UserError) as caught:
        tiny.blueprint(tiny.run_config(NAG, **changes), sequence=4)
    assert caught.value.field == field


def test_config_differences_are_named():
    old = to_dict(tiny.run_config(NAG))
    new = to_dict(tiny.run_config(find_scheme("review")(rank=3), width=32))
    changed = differences(old, new)
    assert changed["model.width"] == (16, 32) and changed["scheme.rank"] == (None, 3)
    assert changed["scheme.name"] == ("nag", "review") and "model.depth" not in changed
    with pytest.raises(UserError, match="frobnicate"):
        from_dict(RunConfig, old | {"frobnicate": 1})


@pytest.mark.parametrize("name", ["steps", "batch", "accumulate", "eval_every", "eval_batches", "save_every", "keep"])
def test_counts_are_at_least_one(name):
    with pytest.raises(UserError) as caught:
        tiny.run_config(NAG, train={name: 0})
    assert caught.value.field == name
    with pytest.raises(UserError, match="batch 8 must be divisible"):
        tiny.run_config(NAG, train={"accumulate": 3})


def test_muon_trains_on_one_device_and_on_eight():
    """Parameters that are Adam's have no place in Muon's state, and the other way round; what is there lies where its
    parameter does."""
    config, losses = tiny.run_config(PLAIN, optimizer={"optimizer": "muon"}), []
    start = jax.device_get(tiny.fresh(tiny.blueprint(config)))
    for mesh in ((1,), (2, 2, 2)):
        bp = tiny.blueprint(config, *mesh)
        state, step = jax.device_put(start, bp.shardings()), jit_train_step(bp)
        for seed in (0, 1):
            state, metrics = step(state, jax.device_put(tiny.packed_batch(seed), batch_sharding(bp.mesh)))
            losses.append(float(metrics.loss))
        up = state.params["blocks"]["mlp"]["branch"]["up"]
        moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.shape == up.shape]
        assert moments and all(moment.sharding == up.sharding for moment in moments)
    assert_close(losses[:2], losses[2:], **tiny.steps(2))
