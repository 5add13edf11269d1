"""Mixture-of-Experts in the training step: every mesh, scheme and policy, and balancing. That a run goes on to the bit
is tested in `test_mixture_run.py`."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.layers.balance import moved_biases
from nagjax.layers.config import MoEConfig
from nagjax.mod import ModConfig
from nagjax.residual.registry import find_scheme, schemes
from nagjax.train.abstract_step import abstract_batch
from nagjax.train.distributed.mesh import batch_sharding
from nagjax.train.step import jit_train_step
from tests import meshes, tiny
from tests.tolerance import assert_close

# An even load per sequence of 8 tokens is 4; room for 3 drops some.
CONFIGS = {
    "dropless": MoEConfig(4, 2, shared=1, hidden=16),
    "capacity": MoEConfig(4, 2, hidden=16, dispatch="capacity", capacity=0.75, bias_rate=0.01),
}
MESHES = {
    "data": dict(data=8),
    "expert": dict(data=1, expert=4),
    "all": dict(data=1, fsdp=2, tensor=2, expert=2),
    "sequence": dict(data=2, fsdp=2, sequence=2),
}
RUN = [("dropless", "sequence"), ("dropless", "all"), ("capacity", "data"), ("capacity", "all")]
MORE = [("dropless", "data"), ("dropless", "expert"), ("capacity", "expert")]  # whose ways are all among those
# A stream of earlier states, one of several lanes, and what keeps the experts' matrices in place; a scheme sees nothing
# else of a branch. "plain" and "nag" are trained in other tests.
STREAMS = set(schemes()) - {"plain", "nag"} if meshes.EVERY else {"block_attn_res", "hyper_connections", "ngpt"}


@functools.cache
def start(scheme: str, moe: MoEConfig, changes=()):
    bp = tiny.blueprint(tiny.run_config(find_scheme(scheme)(), moe=moe, depth=2, **dict(changes)))
    state = jax.device_get(tiny.fresh(bp))
    return state._replace(params=jax.device_get(tiny.moved(state.params)))


def steps(scheme: str, moe: MoEConfig, count: int = 2, mesh=None, train=None, optimizer=None, **changes):
    config = tiny.run_config(find_scheme(scheme)(), moe=moe, depth=2, train=train, optimizer=optimizer, **changes)
    bp = tiny.blueprint(config, **mesh or {})
    state = start(scheme, moe)
    if optimizer or train:
        state = tiny.fresh(bp)._replace(params=state.params)
    state, step, seen = jax.device_put(state, bp.shardings()), jit_train_step(bp), []
    for seed in range(count):
        state, metrics = step(state, jax.device_put(tiny.packed_batch(seed), batch_sharding(bp.mesh)))
        seen.append(metrics)
    return jax.device_get(state), jax.device_get(seen)


one = functools.cache(lambda kind: steps("nag", CONFIGS[kind]))


@pytest.mark.parametrize("kind, mesh", RUN + meshes.EVERY * MORE)
def test_any_mesh_gives_the_losses_of_one_device(kind, mesh):
    state, seen = steps("nag", CONFIGS[kind], mesh=MESHES[mesh])
    want_state, want = one(kind)
    for found, wanted in zip(seen, want, strict=True):
        numbers = [[float(v) for v in metrics if v is not None] for metrics in (found, wanted)]
        assert_close(*numbers, **tiny.steps(2))
    balance = [s.params["blocks"]["mlp"]["branch"].get("balance") for s in (state, want_state)]
    if CONFIGS[kind].bias_rate:
        np.testing.assert_array_equal(*balance)
        assert want[0].expert_dropped > 0


def test_experts_are_split_over_their_axis():
    config = tiny.run_config(find_scheme("nag")(), moe=CONFIGS["dropless"], depth=2)
    up = tiny.blueprint(config, **MESHES["all"]).shardings().params["blocks"]["mlp"]["branch"]["up"]
    assert up.shard_shape((2, 4, 16, 16)) == (2, 2, 8, 8)


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_are_not_gathered_to_be_routed(kind):
    """A mesh that splits only the batch sums gradients, and sends nothing else."""
    bp = tiny.blueprint(tiny.run_config(find_scheme("nag")(), moe=CONFIGS[kind], depth=2), data=8)
    text = jit_train_step(bp).lower(bp.abstract(), abstract_batch(bp)).compile().as_text()
    assert " all-reduce(" in text
    assert not any(f" {kind}(" in text for kind in ("all-gather", "all-to-all", "collective-permute"))


@pytest.mark.parametrize(
    "changes, mesh, field",
    [
        ({}, dict(expert=3, data=1), "mesh.expert"),
        ({"moe": MoEConfig()}, dict(expert=2), "mesh.expert"),
        ({"moe": CONFIGS["capacity"]}, dict(sequence=2), "moe.dispatch"),
    ],
)
def test_meshes_that_do_not_fit(changes, mesh, field):
    config = tiny.run_config(find_scheme("nag")(), **{"moe": CONFIGS["dropless"]} | changes)
    with pytest.raises(UserError) as error:
        tiny.blueprint(config, **mesh)
    assert error.value.field == field


def test_recomputing_changes_nothing():
    state, seen = steps("nag", CONFIGS["dropless"], remat="block")
    assert_close(seen[1].loss, one("dropless")[1][1].loss, **tiny.steps(2))
    assert_close(seen[1].grad_norm, one("dropless")[1][1].grad_norm, **tiny.steps(2))


def test_muon_takes_every_expert_for_a_matrix_of_its_own():
    state, _ = steps("plain", CONFIGS["dropless"], 1, optimizer={"optimizer": "muon", "weight_decay": 0.0, "lr": 1.0,
                                                                  "warmup": 0.0})  # fmt: skip
    before = start("plain", CONFIGS["dropless"]).params["blocks"]["mlp"]["branch"]["up"]
    moved = state.params["blocks"]["mlp"]["branch"]["up"] - before  # lr 1: as large as Muon makes it
    largest = np.linalg.svd(moved, compute_uv=False)[..., 0] / (0.2 * 4)  # of four in one matrix about half of it
    assert np.all((largest > 0.7) & (largest < 1.3))


@pytest.mark.parametrize("name", sorted(STREAMS))
def test_every_kind_of_stream_trains(name):
    _, seen = steps(name, CONFIGS["dropless"], 1)
    assert np.isfinite([seen[0].loss, seen[0].grad_norm]).all() and not seen[0].bad


def test_the_biases_follow_the_load_of_the_whole_batch():
    """Also with the batch in parts; the biases have no gradient, moment or decay, which others of their role may
    have."""
    moe = dataclasses.replace(CONFIGS["capacity"], dispatch="dropless", load_weight=0.0)
    decay = {"decay": ("matrix", "norm"), "weight_decay": 10.0}
    parts, _ = steps("nag", moe, 1, train={"accumulate": 2}, optimizer=decay)
    own = lambda state: state.params["blocks"]["mlp"]["branch"]["balance"]  # noqa: E731
    before = start("nag", moe)
    bp = tiny.blueprint(tiny.run_config(find_scheme("nag")(), moe=moe, depth=2))
    batch = tiny.packed_batch(0)
    load = bp.model(before.params)(batch.tokens, batch.where, progress=0.0).experts["load"]
    np.testing.assert_array_equal(own(parts), moved_biases(own(before), load, moe.bias_rate))


def test_balancing_balances():
    """By biases alone, starting from some that prefer one expert."""
    moe = MoEConfig(4, 1, hidden=16, weights="score", load_weight=0.0, z_weight=0.0, bias_rate=0.05)
    bp = tiny.blueprint(tiny.run_config(find_scheme("plain")(), moe=moe, depth=2, optimizer={"lr": 1e-6}))
    state, step, entropy = tiny.fresh(bp), jit_train_step(bp), []
    branch = state.params["blocks"]["mlp"]["branch"]
    branch["balance"] = branch["balance"].at[:, 0].set(1.0)
    for seed in range(20):
        state, metrics = step(state, tiny.packed_batch(seed))
        assert not metrics.bad
        entropy.append(float(metrics.expert_entropy))
    assert entropy[0] == 0 and np.mean(entropy[-5:]) > 0.85


REMOVED = ModConfig(mlp_rate=(0.0, 1.0), attention_rate=(0.5,))


@pytest.mark.parametrize(
    "mod",
    [ModConfig(rate=(0.5,)), ModConfig(rate=(0.25,), capacity="adaptive"), ModConfig(rate=(0.5,), unit="block"),
     REMOVED],
    ids=["staged", "adaptive", "block", "removed"],
)  # fmt: skip
def test_staged_with_mixture_of_depths(mod):
    """Only tokens that run the MLP are routed to experts. The adaptive one is trained in `test_logs_page.py`."""
    bp = tiny.blueprint(tiny.run_config(find_scheme("nag")(), moe=CONFIGS["dropless"], depth=2, mod=mod))
    params, batch = start("nag", CONFIGS["dropless"], (("mod", mod),)).params, tiny.packed_batch(0)
    cuts = np.full(4, 0.28, np.float32)
    output = jax.jit(lambda params: bp.model(params)(batch.tokens, batch.where, cuts=cuts, mapped=True))(params)
    ran = np.asarray(output.paths["ran"])[1::2] & (batch.segment_ids > 0)
    np.testing.assert_array_equal(output.experts["tokens"], ran.sum((1, 2)))
    assert 0 < ran.sum() < 2 * (batch.segment_ids > 0).sum()
    np.testing.assert_array_equal(np.sum(output.experts["load"], axis=-1), 2 * output.experts["tokens"])


def test_a_block_that_routes_no_token_is_trained_with():
    bp = tiny.blueprint(tiny.run_config(find_scheme("nag")(), moe=CONFIGS["dropless"], depth=2, mod=REMOVED))
    state = jax.device_put(start("nag", CONFIGS["dropless"], (("mod", REMOVED),)))
    _, metrics = jit_train_step(bp)(state, tiny.packed_batch(0))
    assert not metrics.bad


def test_integrated_with_mixture_of_depths():
    """A token whose choices all do nothing skips the sublayer: its residual does not change."""
    moe = MoEConfig(2, 2, hidden=16, skips=3)
    bp = tiny.blueprint(tiny.run_config(find_scheme("plain")(), moe=moe, depth=2))
    params, batch = start("plain", moe).params, tiny.packed_batch(0)
    paths = bp.model(params)(batch.tokens, batch.where, mapped=True).paths
    ran, turn = (np.asarray(paths[name])[1::2] for name in ("ran", "turn"))
    assert 0 < (~ran).sum() < ran.size
    assert np.all(turn[~ran] == 0) and np.all(turn[ran & (batch.segment_ids > 0)] > 0)


@pytest.mark.parametrize("mod", [ModConfig(rate=(0.5,)), ModConfig(rate=(0.5,), unit="block")])
def test_one_way_of_skipping_at_a_time(mod):
    with pytest.raises(UserError) as error:
        tiny.model_config(moe=MoEConfig(4, 2, skips=1), mod=mod)
    assert error.value.field == "moe.skips"
    tiny.model_config(moe=MoEConfig(4, 2, skips=1), mod=ModConfig(rate=(0.5,), skip="attention"))


def test_a_lone_expert_needs_a_scheme_that_sees_its_weight():
    with pytest.raises(UserError) as error:
        tiny.blueprint(tiny.run_config(find_scheme("nag")(), moe=MoEConfig(4, 1, weights="score")))
    assert error.value.field == "moe.active"


@pytest.mark.parametrize("name", [name for name, scheme in schemes().items() if scheme.scale_free])
def test_to_run_or_not_needs_a_scheme_that_sees_an_experts_weight(name):
    make = lambda **own: tiny.blueprint(tiny.run_config(find_scheme(name)(), moe=MoEConfig(4, 2, **own)))  # noqa: E731
    with pytest.raises(UserError, match=rf"moe.skips = 1: {name} .*no gradient: use 0, or --moe.shared 1"):
        make(skips=1)
    make(skips=1, shared=1)
