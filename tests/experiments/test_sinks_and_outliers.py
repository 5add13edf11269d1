import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.harness.jobs import Record
from experiments.sinks_and_outliers import (
    KINDS,
    MEASURES,
    ROUNDED,
    SIZES,
    Rounding,
    damage,
    round_matrices,
    summarise,
    weights,
)
from nagjax.layers.branch import Update
from nagjax.layers.mlp import MLP
from nagjax.layers.parameters import Scales
from nagjax.layers.platform import tracing_for
from nagjax.measure.cuts import Cutter
from nagjax.measure.rounding import float8_round_trip, integer_round_trip
from nagjax.residual import Boundary, find_scheme, sublayer
from nagjax.residual.protocol import SublayerIndex
from nagjax.residual.schemes.nag import NAG, NAGStream
from nagjax.runs.opening import OpenRun
from tests import tiny
from tests.tolerance import assert_close


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    blueprint = tiny.blueprint(tiny.run_config(find_scheme("nag")(), depth=2))
    params = tiny.moved(jax.jit(lambda: blueprint.init_params(0))())
    return OpenRun(tmp_path_factory.mktemp("run"), blueprint, 100, params, {}, None)


def on_four_bits(run: OpenRun) -> dict:
    """The run's parameters, with branch matrices whose columns are whole numbers up to 7."""
    noise = np.random.default_rng(0)

    def planted(described, x):
        if described.role != "matrix":
            return x
        whole = noise.integers(-7, 8, x.shape)
        whole[:, 0] = 7
        return jnp.asarray(0.03 * whole, jnp.float32)

    return jax.tree.map(planted, run.blueprint.parameters, run.params)


def test_matrices_are_rounded_and_nothing_else(run):
    for kind in KINDS[1:]:
        rounded = round_matrices(run, kind)
        changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), run.params, rounded)
        roles = jax.tree.map(lambda described: described.role == "matrix", run.blueprint.parameters)
        assert changed == roles
    query = run.params["blocks"]["attention"]["branch"]["query"]
    by_hand = [[integer_round_trip(column) for column in block.T] for block in query]
    got = round_matrices(run, "int8")["blocks"]["attention"]["branch"]["query"]
    assert_close(got, np.swapaxes(by_hand, 1, 2), terms=64, chain=4)
    got = round_matrices(run, "fp8")["blocks"]["attention"]["branch"]["query"]
    assert_close(got, [float8_round_trip(block) for block in query], terms=64, chain=4)


@dataclasses.dataclass(frozen=True)
class RoundedNAG(NAG):
    """Reads in 8 bits by its own definition."""

    def read(self, stream):
        return integer_round_trip(stream.direction)


def test_what_rounding_adds_to_the_loss(run):
    planted = dataclasses.replace(run, params=on_four_bits(run))
    text = [tiny.packed_batch(0), tiny.packed_batch(1)]
    found = damage(planted, text)
    assert found.keys() == ROUNDED.keys()
    # Whole numbers up to 7 fit four bits, and the three bits of e4m3's mantissa.
    assert found["int4 weights"] == pytest.approx(0, abs=1e-6) == found["fp8 weights"]
    assert found["fp8"] == pytest.approx(found["fp8 inputs"], abs=1e-6)
    rounded = tiny.blueprint(tiny.run_config(RoundedNAG(), depth=2))
    added = Cutter(dataclasses.replace(planted, blueprint=rounded)).loss(text) - Cutter(planted).loss(text)
    assert found["int8 inputs"] == pytest.approx(added, abs=2e-6) and abs(added) > 1e-4
    others = [found[name] for name in ("int8 weights", "int8 inputs", "int8", "fp8", "int4 inputs")]
    assert 0.0 not in others and len({round(value, 6) for value in others}) == len(others)  # each does something else


def test_only_reading_is_rounded():
    scheme, noise = find_scheme("nag")(), np.random.default_rng(0)
    stream = NAGStream(jnp.asarray(noise.standard_normal((2, 3, 8)), jnp.float32), jnp.zeros((2, 3)))
    rounding = Rounding(scheme, jnp.int32(KINDS.index("int4")))
    assert_close(rounding.read(stream), integer_round_trip(stream.direction, 4), terms=64, chain=4)
    np.testing.assert_array_equal(Rounding(scheme, jnp.int32(0)).read(stream), stream.direction)
    assert rounding.lanes(stream)[0].shape == (2, 3, 8) and rounding.skip == scheme.skip


def test_gates_read_what_is_not_rounded():
    scheme, noise = find_scheme("nag")(ramp=0.0), np.random.default_rng(0)
    stream = NAGStream(jnp.asarray(noise.standard_normal((2, 64, 8)), jnp.float32), jnp.zeros((2, 64)))
    gate, branch = scheme.gate(8, SublayerIndex(1, 2), nnx.Rngs(0)), MLP("swiglu", 8, 12, Scales(), nnx.Rngs(1))
    at = Boundary(gate, None, jnp.int32(1), jnp.int32(2), jnp.float32(1.0), 2)
    for kind in range(len(KINDS)):
        with tracing_for("cpu"):
            result = sublayer.run(Rounding(scheme, jnp.int32(kind)), stream, lambda x: Update(branch(x)), at)
        assert_close(result.gate[..., 0], gate(stream.direction), terms=8, chain=4)


def test_weights_are_told_by_matrix(run):
    found = weights(run)
    assert {"attention.query", "attention.out", "mlp.gate", "mlp.down", "embedding", "head"} == found.keys() - {
        "attention.key",
        "attention.value",
        "mlp.up",
    }
    x = np.asarray(run.params["blocks"]["mlp"]["branch"]["down"], np.float64).reshape(2, -1)
    x = x - x.mean(axis=1, keepdims=True)
    assert found["mlp.down"]["kurtosis"] == pytest.approx(np.mean((x**4).mean(1) / (x**2).mean(1) ** 2), rel=1e-3)
    assert found["mlp.down"]["peak"] == pytest.approx(np.mean(np.abs(x).max(1) / x.std(1)), rel=1e-3)


def record(scheme, seed, size):
    metrics = {
        "loss": 3.0 + 0.01 * seed,
        "first": [0.1 * size, 0.2 * size],
        "sinks": [0.0, 0.25 * size],
        "uniform": 0.05,
        "kurtosis": [3.0, 3.0 + size + 0.01 * seed],
        "kurtosis_first": [3.0, 9.0],
        "massive": [4.0, 20.0 * size],
        "weights": {"mlp.up": {"kurtosis": 3.0, "peak": 4.0, "offset": 0.01}},
        "damage": {name: 1e-3 * size * (1 + 0.1 * seed) for name in ROUNDED},
    }
    return Record("", {"scheme": scheme, "seed": seed}, {}, metrics)


def test_verdicts():
    settings = SIZES["cpu"]
    both = lambda plain, nag: [record(s, seed, x) for s, x in (("plain", plain), ("nag", nag)) for seed in range(3)]  # noqa: E731
    won = summarise(settings, both(2.0, 1.0))
    assert won.verdict == "supported" and "int8 damage 0.0011 [0.0009, 0.0013]" in won.measured
    assert won.details["plain_minus_nag"].keys() == MEASURES.keys()
    assert won.details["plain_minus_nag"]["log massive ratio"]["estimate"] == pytest.approx(np.log(2))
    assert [row["scheme"] for row in won.table] == ["plain", "nag"]  # what has no runs has no row
    assert summarise(settings, both(1.0, 2.0)).verdict == "not supported"
    assert summarise(settings, both(1.0, 1.0)).verdict == "undecided"
    # One part against the claim is enough, whatever the others say.
    mixed = both(2.0, 1.0)
    for one in mixed:
        one.metrics["first"] = [0.1 if one.labels["scheme"] == "plain" else 0.3]
    found = summarise(settings, mixed)
    assert found.verdict == "not supported"
    assert found.details["plain_minus_nag"]["int8 damage"]["p"] < 0.05
    assert summarise(settings, mixed[:3]).verdict == "undecided"  # no NAG run, nothing to compare
