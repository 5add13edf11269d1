"""What NAG promises at any depth: unit RMS, orthogonal updates, growth sqrt(1 + t^2), a modulator that stays alive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.measure.angles import angle
from nagjax.model.config import ModelConfig
from nagjax.model.transformer import Transformer
from nagjax.residual.registry import find_scheme
from nagjax.residual.schemes.nag import NAG, NAGStream
from tests.residual.stack import boundary, build, normal, streams
from tests.tolerance import assert_close

WIDTH = 48


def rms(x):
    return np.sqrt(np.mean(np.asarray(x, np.float64) ** 2, axis=-1))


def wide_open(stack):
    """Sets every modulator to m = 1, whatever it reads."""
    for gate in stack.gates:
        gate.bias = nnx.Param(jnp.full_like(gate.bias[...], 200.0))
    return stack


def test_unit_rms_over_256_sublayers_in_bfloat16():
    scheme = NAG()
    stack = wide_open(build(scheme, width=WIDTH, sublayers=1, moved=0.0))
    stack.gates[0].alpha = nnx.Param(jnp.float32(0.4))
    at = boundary(stack, 1)
    opened = scheme.open(jnp.asarray(normal(0, 2, 16, WIDTH), jnp.bfloat16), boundary(stack, 0), stack.ends)

    def sublayer(stream, key):
        update = jax.random.normal(key, stream.direction.shape, jnp.bfloat16)
        stream, _ = scheme.advance(stream, update, at)
        return stream, stream

    last, seen = jax.jit(lambda s: jax.lax.scan(sublayer, s, jax.random.split(jax.random.key(1), 256)))(opened)
    assert last.direction.dtype == jnp.bfloat16 and last.log_norm.dtype == jnp.float32
    drift = np.abs(rms(seen.direction.astype(jnp.float32)) - 1.0)
    assert drift.max() <= 2.0**-8, f"RMS drifts by {drift.max():.1e}"  # spacing of bfloat16 just below 1
    grown = np.asarray(last.log_norm) - np.asarray(opened.log_norm)
    assert_close(grown, 256 * 0.5 * np.log1p(0.4**2), terms=256)


@pytest.mark.parametrize("along", [0.0, 30.0], ids=["random", "mostly_parallel"])
def test_the_written_update_is_orthogonal_and_grows_the_norm_as_predicted(along):
    scheme = NAG()
    stack = build(scheme, width=WIDTH, sublayers=1)
    at, before = boundary(stack, 1), streams(stack, normal(0, 2, 5, WIDTH), [])[0]
    update = jnp.asarray(normal(1, 2, 5, WIDTH)) + along * before.direction + 3.0
    t = np.asarray(scheme.turn(before, at), np.float64)
    after, _ = scheme.advance(before, update, at)

    old, new = np.asarray(before.direction, np.float64), np.asarray(after.direction, np.float64)
    growth = np.exp(np.asarray(after.log_norm, np.float64) - np.asarray(before.log_norm, np.float64))
    written = growth[..., None] * new - old
    assert_close(growth, np.sqrt(1.0 + t**2), terms=1, chain=4, scale=4.0)
    assert_close(rms(written), np.abs(t), terms=1, chain=4, scale=4.0)
    cosine = np.mean(written * old, -1) / rms(written)
    assert np.abs(cosine).max() < 1e-5 * (1 + along / 10)
    assert np.abs(np.mean(written, -1)).max() < 1e-5


@pytest.mark.parametrize("sublayers", [16, 256])
def test_whatever_is_written_a_start_at_1_over_l_bounds_turn_and_growth_at_any_depth(sublayers):
    """As `nag_harmonic` says, with the bounds of 1/sqrt(l) beside it, which the same updates pass."""
    bounds = {
        "nag_harmonic": (1 + np.log(sublayers), np.sqrt(np.sinh(np.pi) / np.pi)),
        "nag": (2 * np.sqrt(sublayers), np.sqrt(sublayers + 1.0)),
    }
    found = {}
    for name, (most_turned, most_grown) in bounds.items():
        stack = wide_open(build(find_scheme(name)(), width=WIDTH, sublayers=sublayers, moved=0.0))
        seen = streams(stack, normal(0, 1, 4, WIDTH), 1e4 * normal(1, sublayers, 1, 4, WIDTH))
        directions = jnp.stack([stream.direction for stream in seen])
        turned = np.sum(angle(directions[:-1], directions[1:]), axis=0)
        grown = np.exp(np.asarray(seen[-1].log_norm) - np.asarray(seen[0].log_norm))
        assert np.all(turned <= most_turned) and np.all(grown <= most_grown * (1 + 1e-3))
        assert np.all(turned > 0.7 * most_turned) and np.all(grown > 0.95 * most_grown)  # bounds that tell
        found[name] = turned, grown
    assert np.all(found["nag"][0] > bounds["nag_harmonic"][0]) and np.all(found["nag"][1] > bounds["nag_harmonic"][1])


def test_the_gates_of_pre_norm_rezero_bound_its_residual():
    stack, sublayers = build(find_scheme("rezero_prenorm")(), width=WIDTH, sublayers=8), 8
    start, updates = normal(0, 1, 4, WIDTH), normal(1, sublayers, 1, 4, WIDTH)
    gates = np.array([float(gate.value[...]) for gate in stack.gates])
    sizes = lambda x: np.linalg.norm(np.asarray(x, np.float64), axis=-1)  # noqa: E731
    bound = sizes(start) + np.abs(gates) @ sizes(updates).reshape(sublayers, -1)
    assert np.all(sizes(streams(stack, start, updates)[-1].hidden) <= bound)
    along = np.sign(gates)[:, None, None, None] * start
    met = sizes(start) * (1 + np.sum(np.abs(gates)))
    assert_close(sizes(streams(stack, start, along)[-1].hidden), met, terms=1, chain=4 * sublayers, scale=20.0)
    shut = build(find_scheme("rezero_prenorm")(), width=WIDTH, sublayers=sublayers, moved=0.0)
    np.testing.assert_array_equal(streams(shut, start, 1e4 * updates)[-1].hidden, start)


def test_total_growth_at_the_start_values_is_the_root_of_the_sublayers():
    sublayers = 24
    stack = wide_open(build(NAG(), width=WIDTH, sublayers=sublayers, moved=0.0))
    seen = streams(stack, normal(0, 1, 4, WIDTH), normal(1, sublayers, 1, 4, WIDTH))
    for done in (1, 5, sublayers):
        growth = np.exp(np.asarray(seen[done].log_norm) - np.asarray(seen[0].log_norm))
        assert_close(growth, np.sqrt(done + 1), terms=1, chain=4 * done)


def test_alpha_rises_over_the_ramp():
    stack = build(NAG(ramp=0.2), width=WIDTH, sublayers=2)
    stream = streams(stack, normal(0, 1, 4, WIDTH), [])[0]
    update = jnp.asarray(normal(1, 1, 4, WIDTH))

    def turn(progress, scheme=stack.scheme):
        return np.asarray(scheme.turn(stream, boundary(stack, 1, progress)))

    assert_close(turn(0.05), 0.25 * turn(1.0), terms=1, chain=4)
    assert_close(turn(0.2), turn(1.0), terms=1, chain=4)
    np.testing.assert_array_equal(turn(0.0, NAG(ramp=0.0)), turn(1.0))
    still, _ = stack.scheme.advance(stream, update, boundary(stack, 1, 0.0))
    np.testing.assert_array_equal(still.log_norm, stream.log_norm)
    assert_close(still.direction, stream.direction, terms=1, chain=4)


@pytest.mark.parametrize("beta", [-3.0, 0.54, 3.0])
def test_a_closed_modulator_has_finite_gradients(beta):
    """x ** beta at x = 0: the mixture underflows to 0 for every token here."""
    stack = build(NAG(), width=WIDTH, sublayers=1)
    graph, params = nnx.split(stack.gates[0])
    params["bias"] = params["bias"].replace(jnp.full_like(params["bias"][...], -200.0))
    params["beta"] = params["beta"].replace(jnp.float32(beta))
    direction = streams(stack, normal(0, 1, 4, WIDTH), [])[0].direction
    value, grads = jax.value_and_grad(lambda p, r: jnp.sum(nnx.merge(graph, p)(r)), argnums=(0, 1))(params, direction)
    for leaf in jax.tree.leaves((value, grads)):
        assert np.all(np.isfinite(leaf))
    assert 0.0 <= value <= 4.0 * 1e-6 ** np.log1p(np.exp(beta)) * 1.01


def test_the_embedding_enters_centred_and_padding_of_zeros_stays_finite():
    scheme = NAG()
    stack = build(scheme, width=WIDTH, sublayers=1)
    shifted = normal(0, 1, 4, WIDTH) + 5.0

    def opened(embedding) -> NAGStream:
        return scheme.open(embedding, boundary(stack, 0), stack.ends)

    stream = opened(jnp.asarray(shifted))
    assert np.abs(np.mean(np.asarray(stream.direction, np.float64), -1)).max() < 1e-6
    assert_close(rms(stream.direction), 1.0, terms=1, chain=4)
    zeros, pull = jax.vjp(opened, jnp.zeros((1, 4, WIDTH)))
    (grad,) = pull(jax.tree.map(jnp.ones_like, zeros))
    assert all(np.all(np.isfinite(x)) for x in (*zeros, grad))
    np.testing.assert_array_equal(grad, np.zeros_like(grad))  # equal for all features: an embedding has no mean


@pytest.mark.parametrize("name", ["nag", "ngpt"])
def test_rows_of_zeros_do_not_rule_the_gradient(name):
    """One division by a row's RMS in every sublayer would overflow long before the last of 24."""
    stack = build(find_scheme(name)(), width=WIDTH, sublayers=24, moved=0.0)
    weights = normal(0, 1, 4, WIDTH)

    def loss(embedding, updates):
        return jnp.mean(weights * stack.scheme.close(streams(stack, embedding, updates)[-1], stack.ends)[0])

    zeros = jnp.zeros((1, 4, WIDTH)), jnp.zeros((24, 1, 4, WIDTH))
    by_embedding, by_update = jax.grad(loss, argnums=(0, 1))(*zeros)
    largest = np.abs(weights).max() / weights.size
    assert 0.01 * largest < np.abs(by_embedding).max() < 2.0 * largest
    assert 0.0 < np.abs(by_update).max() < 2.0 * largest


@pytest.mark.parametrize("ramp", [0.0, 0.05])
def test_the_first_loss_is_near_that_of_a_guess_with_and_without_a_ramp(ramp):
    """At 48 blocks a log-norm that has grown from the first step on would make the first logits twice too large."""
    config = ModelConfig(depth=48, width=32, context=32, vocab=257, dtype="float32")
    tokens, targets = np.random.default_rng(0).integers(0, 257, (2, 8, 32))

    @jax.jit
    def start():
        model = Transformer(config, NAG(ramp=ramp), nnx.Rngs(0))
        logits = model.logits(model(tokens, progress=0.0))
        own = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - own), jnp.std(logits)

    loss, spread = start()
    assert loss < 1.05 * np.log(257)
    assert 0.4 < spread < 0.6
