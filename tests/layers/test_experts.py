"""Experts against a loop over tokens in numpy, for every kind of dispatch, and their balancing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nagjax.errors import UserError
from nagjax.layers.balance import auxiliary_loss, balance_of, moved_biases
from nagjax.layers.config import MoEConfig
from nagjax.layers.experts import Experts
from nagjax.layers.mlp import MLP
from nagjax.layers.parameters import Scales
from nagjax.layers.platform import tracing_for
from nagjax.layers.ragged import ragged_matmul
from pallas_kernels import shard_rows
from tests.tolerance import assert_close

WIDTH, HIDDEN = 16, 24
X = np.random.default_rng(0).standard_normal((3, 20, WIDTH)).astype(np.float32)
REAL = np.arange(20) < np.array([[20], [13], [1]])
CLOSE = {"terms": HIDDEN, "chain": 6}

KINDS = {
    "two": MoEConfig(5, 2, hidden=HIDDEN),
    "shared": MoEConfig(5, 2, shared=2, hidden=HIDDEN, score="sigmoid", bias_rate=0.1),
    "one": MoEConfig(3, 1, hidden=HIDDEN, weights="score"),
    "skips": MoEConfig(4, 2, hidden=HIDDEN, skips=3),
}


@functools.cache
def made(config: MoEConfig, kind: str = "swiglu") -> Experts:
    branch = Experts(WIDTH, config, kind, Scales(), nnx.Rngs(0))
    if branch.balance is not None:
        branch.balance[...] = jnp.linspace(-0.3, 0.3, config.choices)
    return branch


def with_dispatch(branch: Experts, **changes) -> Experts:
    graph, state = nnx.split(branch)
    other = nnx.merge(graph, state)
    other.config = dataclasses.replace(branch.config, **changes)
    return other


def silu(x):
    return x / (1 + np.exp(-x))


def by_hand(branch: Experts, x, real):
    """Float64, one token at a time: the update, and the choices by expert."""
    wide = lambda p: np.asarray(p[...], np.float64)  # noqa: E731
    config, update, load = branch.config, np.zeros(x.shape), np.zeros((x.shape[0], branch.config.choices))
    for b, t in np.ndindex(x.shape[:2]):
        token = x[b, t].astype(np.float64)
        if branch.shared_up is not None:
            opened = silu(token @ wide(branch.shared_gate)) * (token @ wide(branch.shared_up))
            update[b, t] += opened @ wide(branch.shared_down)
        if not real[b, t]:
            continue
        logits = token @ wide(branch.router)
        score = np.exp(logits) / np.exp(logits).sum() if config.score == "softmax" else 1 / (1 + np.exp(-logits))
        preferred = score + (0 if branch.balance is None else wide(branch.balance))
        chosen = np.argsort(-preferred, kind="stable")[: config.active]
        total = score[chosen].sum() if config.weights == "normalised" else 1.0
        for e in chosen:
            load[b, e] += 1
            if e < config.experts:
                opened = silu(token @ wide(branch.gate)[e]) * (token @ wide(branch.up)[e])
                update[b, t] += score[e] / total * (opened @ wide(branch.down)[e])
    return update, load


@pytest.mark.parametrize(
    "kind, dispatch",
    [(kind, dispatch) for kind in ("two", "skips") for dispatch in ("dropless", "capacity")]
    + [("shared", "dropless"), ("one", "capacity"), ("two", "another platform's")],
)
def test_tokens_get_what_their_experts_make_of_them(kind, dispatch):
    """With room for all, capacity drops nothing; padding goes to no expert and is not counted."""
    branch = made(KINDS[kind])
    roomy = with_dispatch(branch, dispatch="capacity", capacity=1e3)
    with tracing_for("tpu" if dispatch == "another platform's" else "cpu"):
        got = (roomy if dispatch == "capacity" else branch).choose(jnp.asarray(X), jnp.asarray(REAL), lossless=False)
    update, load = by_hand(branch, X, REAL)
    assert_close(got.value, update, **CLOSE)
    np.testing.assert_array_equal(got.notes["load"], load)
    np.testing.assert_array_equal(got.notes["tokens"], REAL.sum(1))
    np.testing.assert_array_equal(got.notes["dropped"], 0)
    assert_close(np.sum(got.notes["score"], axis=-1), REAL.sum(1), terms=20)
    if KINDS[kind].skips:
        nothing = ~np.any(update != 0, axis=-1)
        assert np.any(nothing & REAL)
        np.testing.assert_array_equal(got.ran, ~nothing | ~REAL)
    else:
        assert got.ran is None


def test_scores_are_float32_on_every_platform():
    """A TPU multiplies float32 in bfloat16 unless it is asked for more. Only the router's matmul is as narrow."""
    branch, x = made(KINDS["two"]), jnp.asarray(X, jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda x: branch.choose(x, jnp.asarray(REAL), lossless=True).value)(x)
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    (router,) = [eqn for eqn in products if eqn.outvars[0].aval.shape == (*X.shape[:2], branch.config.choices)]
    assert router.params["precision"] == 2 * (jax.lax.Precision.HIGHEST,)
    assert {var.aval.dtype for var in router.invars} == {jnp.dtype("float32")}


def gradient(branch: Experts, room: bool):
    graph, params = nnx.split(branch)

    def loss(params, x):
        done = nnx.merge(graph, params).choose(x, jnp.asarray(REAL), lossless=not room)
        return jnp.sum(jnp.sin(done.value)) + jnp.sum(done.notes["z"])

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, jnp.asarray(X))


@pytest.mark.parametrize("kind", ["shared", "skips"])
def test_gradients_of_both_ways_are_equal(kind):
    branch = made(KINDS[kind])
    sorted_by_expert = gradient(branch, room=False)
    by_capacity = gradient(with_dispatch(branch, dispatch="capacity", capacity=1e3), room=True)
    assert_close(by_capacity, sorted_by_expert, **CLOSE | {"terms": 60})
    found = nnx.to_pure_dict(sorted_by_expert[0])
    assert all(np.any(leaf != 0) for name, leaf in found.items() if name != "balance")
    if branch.balance is not None:
        np.testing.assert_array_equal(found["balance"], 0)


def test_without_room_later_tokens_are_dropped_and_no_earlier_one_notices():
    tight = with_dispatch(made(KINDS["two"]), dispatch="capacity", capacity=0.5)
    real = np.ones((3, 20), bool)
    got = tight.choose(jnp.asarray(X), jnp.asarray(real), lossless=False)
    everything, load = by_hand(tight, X, real)
    room = 4  # half of 2 x 20 / 5
    np.testing.assert_array_equal(got.notes["dropped"], np.maximum(load - room, 0).sum(1))
    assert np.all(got.notes["dropped"] > 0)
    differ = np.abs(np.asarray(got.value) - everything).max(-1) > 1e-4
    assert not differ[:, :room].any() and differ.any()
    changed = X.copy()
    changed[:, 12:] = 1.0
    again = tight.choose(jnp.asarray(changed), jnp.asarray(real), lossless=False)
    assert_close(again.value[:, :12], got.value[:, :12], **CLOSE)
    assert_close(tight.choose(jnp.asarray(X), jnp.asarray(real), lossless=True).value, everything, **CLOSE)


@pytest.mark.parametrize("sizes", [(5, 0, 7, 3), (0, 0, 0, 0), (300, 1, 0, 11), (0, 0, 0, 40)])
def test_ragged_matmuls(sizes):
    noise = np.random.default_rng(1)
    rows = noise.standard_normal((sum(sizes) + 6, 8)).astype(np.float32)
    matrices = noise.standard_normal((4, 8, 5)).astype(np.float32)
    group = np.repeat(np.arange(4), sizes)
    want = np.zeros((len(rows), 5))
    want[: sum(sizes)] = np.einsum("nm,nmk->nk", rows[: sum(sizes)].astype(float), matrices[group].astype(float))
    both = lambda rows, matrices: ragged_matmul(rows, matrices, jnp.asarray(sizes, jnp.int32))  # noqa: E731
    got, back = jax.vjp(both, jnp.asarray(rows), jnp.asarray(matrices))
    assert_close(got, want, terms=8)
    by_rows, by_matrices = back(jnp.asarray(want, jnp.float32))
    wanted_rows, wanted_matrices = np.zeros(rows.shape), np.zeros(matrices.shape)
    for row, e in enumerate(group):
        wanted_rows[row] = matrices[e] @ want[row]
        wanted_matrices[e] += np.outer(rows[row], want[row])
    assert_close(by_rows, wanted_rows, terms=8, chain=2)
    assert_close(by_matrices, wanted_matrices, terms=400, chain=2)
    twice = jax.vmap(both, (0, None))(jnp.stack([rows, 2 * rows]), jnp.asarray(matrices))
    assert_close(twice, np.stack([want, 2 * want]), terms=8)


@pytest.mark.parametrize("shared", [0, 2])
def test_the_start_has_one_mlps_variance(shared):
    config = MoEConfig(8, 2, shared=shared, hidden=256)
    x = np.random.default_rng(0).standard_normal((1, 512, 128)).astype(np.float32)
    scales = Scales(output=0.3, inner=0.5)
    got = Experts(128, config, "swiglu", scales, nnx.Rngs(0))(jnp.asarray(x))
    want = MLP("swiglu", 128, 256 * (2 + shared), scales, nnx.Rngs(1))(jnp.asarray(x))
    assert float(np.std(got)) == pytest.approx(float(np.std(want)), rel=0.2)  # chosen weights are not quite alike


def test_balance_by_hand():
    config = MoEConfig(2, 1, weights="score", load_weight=0.5, z_weight=0.25, skips=1)
    notes = {
        "load": jnp.array([[3.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        "score": jnp.array([[2.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
        "z": jnp.array([8.0, 0.0]),
        "dropped": jnp.array([1.0, 0.0]),
        "tokens": jnp.array([4.0, 0.0]),
    }
    even = 3 * (3 / 4 * 2 / 4 + 1 / 4 * 1 / 4)
    assert float(auxiliary_loss(notes, config)) == pytest.approx(0.5 * even + 0.25 * 2)
    by_score = jax.grad(lambda score: auxiliary_loss(notes | {"score": score}, config))(notes["score"])
    np.testing.assert_allclose(by_score[0], 0.5 * 3 * np.array([3, 1, 0]) / 16, rtol=1e-6)
    np.testing.assert_allclose(moved_biases(jnp.zeros((2, 3)), notes["load"], 0.1), [[-0.1, 0.1, 0.1], [0, 0, 0]])
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(3)
    np.testing.assert_allclose(balance_of(notes), [9 / 4, 0, entropy, 1 / 4], rtol=1e-6)


@pytest.mark.parametrize(
    "field, changes",
    [
        ("moe.active", dict(experts=2, active=3)),
        ("moe.weights", dict(experts=4, active=1)),
        ("moe.capacity", dict(experts=4, capacity=0.0)),
    ],
)
def test_bad_configs(field, changes):
    with pytest.raises(UserError) as error:
        MoEConfig(**changes)
    assert error.value.field == field


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_where_the_tokens_of_a_sequence_are_split_only_dropless_goes_on(dispatch):
    """Room is counted over whole sequences, of which a device then has a part."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "seq"))
    branch = with_dispatch(made(KINDS["two"]), dispatch=dispatch)
    graph, params = nnx.split(branch)
    x, real = jnp.asarray(X[:2]), jnp.ones((2, 20), bool)

    def run(params, x, real):
        return nnx.merge(graph, params).choose(x, real, lossless=False).value

    split = jax.jit(shard_rows(run, mesh, P("data", "seq")))
    if dispatch == "capacity":
        with pytest.raises(UserError, match="moe.dispatch = 'capacity': the tokens of a sequence are split.*dropless"):
            split(params, x, real)
    else:
        assert_close(split(params, x, real), run(params, x, real), **CLOSE)
