"""The NAG update whose turn is decided by the modulator."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import nag_update, nag_update_modulated, shard_rows
from pallas_kernels.launch import interpreting
from pallas_kernels.shapes import COVER, COVER_WIDE
from tests.pallas_kernels import nag_oracle
from tests.pallas_kernels.kernel_lowering import CUSTOM_CALL, INTERPRETERS, STRICT
from tests.tolerance import assert_close

ARGUMENTS = ("direction", "log_norm", "update", "weight", "bias", "logits", "beta", "alpha")
NAMES = ("direction", "log_norm", "turn", *(f"d_{name}" for name in ARGUMENTS))
REFUSED = ("pallas_triton", 5461, "float32")  # see the README: float32 rows wider than 4096 go to `composed`
SHAPES = ((7, 96, "float32"), (33, 640, "bfloat16"), (300, 128, "float32"))
WIDE = COVER_WIDE[1::2] + COVER_WIDE[-1:]


def oracle(r, s, u, weight, bias, logits, beta, alpha):
    share = jnp.exp(logits) / jnp.exp(logits).sum()
    mixture = (share / (1 + jnp.exp(-(r @ weight + bias)))).sum(-1)
    turn = alpha * jnp.where(mixture > 1e-6, mixture, 1e-6) ** beta
    return *nag_oracle.update(r, s, u, turn), turn


def inputs(n, d, dtype, gates=8):
    (r, s, u, _), (g, ds) = nag_oracle.inputs(n, d, dtype)
    normal = np.random.default_rng(7).standard_normal
    parameters = normal((d, gates)) / np.sqrt(d), normal(gates), normal(gates), 1.3, 0.4
    primals = (r, s, u, *(jnp.asarray(x, jnp.float32) for x in parameters))
    return primals, (g, ds, jnp.asarray(normal(n), jnp.float32))


@functools.cache  # a function of its own would be compiled again
def implementation(name):
    return lambda *args: nag_update_modulated(*args, implementation=name)


def assert_each_close(got, want, width, dtype):
    """bfloat16 weights are exact to 16 bits, and d_direction is then the sum of two terms rounded to bfloat16."""
    got, want = ([np.atleast_1d(x) for x in side] for side in (got, want))
    coarse = dtype == "bfloat16"
    sums = 3000 / np.sqrt(width) if coarse else 32
    for name, value, truth in zip(NAMES, got, want, strict=True):
        more = 10 if coarse and name == "d_direction" else 1
        nag_oracle.assert_close([name], [value], [truth], width, more * sums)


@pytest.mark.parametrize(
    "name, shape",
    [("xla", shape) for shape in COVER[::2]]
    + [(name, shape) for name in ("reference", *INTERPRETERS) for shape in SHAPES]
    + [(name, shape) for name in INTERPRETERS for shape in WIDE if (name, *shape[1:]) != REFUSED],
    ids=str,
)
def test_against_float64(name, shape):
    primals, cotangents = inputs(*shape)
    with interpreting(INTERPRETERS.get(name)):
        got = nag_oracle.with_gradients(implementation(name), primals, cotangents)
    chex.assert_trees_all_equal_shapes_and_dtypes(tuple(got[3:]), primals)
    assert_each_close(got, nag_oracle.exact(oracle, primals, cotangents), *shape[1:])


@pytest.mark.parametrize("name", ("xla", "mosaic_tpu"))
def test_closed_gate_is_finite_and_still(name):
    """Where every gate is shut the mixture is clamped: a turn of alpha * 1e-6 ** beta, and no gradient to the gate."""
    primals, cotangents = inputs(7, 96, "float32")
    primals = (*primals[:4], primals[4] - 200, *primals[5:])
    with interpreting(INTERPRETERS.get(name)):
        got = dict(zip(NAMES, nag_oracle.with_gradients(implementation(name), primals, cotangents), strict=True))
    chex.assert_tree_all_finite(got)
    np.testing.assert_allclose(got["turn"], 0.4 * 1e-6**1.3, rtol=1e-4)
    for parameter in ("weight", "bias", "logits"):
        assert not np.any(got[f"d_{parameter}"])


def test_is_the_plain_update_by_its_own_turn():
    primals, _ = inputs(9, 128, "float32")
    direction, log_norm, turn = nag_update_modulated(*primals)
    assert_close((direction, log_norm), nag_update(*primals[:3], turn), terms=128, chain=2)


def test_kernel_sums_over_rows_are_the_same_every_time():
    primals, cotangents = inputs(300, 128, "float32")
    with interpreting(STRICT):
        runs = [nag_oracle.with_gradients(implementation("mosaic_tpu"), primals, cotangents) for _ in range(2)]
    chex.assert_trees_all_equal(*runs)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_sharded_rows_sum_the_parameter_gradients_once(kind):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    (r, s, u, *parameters), cotangents = inputs(16, 96, "float32")
    fold = lambda x: x.reshape(4, 4, *x.shape[1:])  # noqa: E731
    primals, cotangents = (fold(r), fold(s), fold(u), *parameters), jax.tree.map(fold, cotangents)
    want = nag_oracle.with_gradients(nag_update_modulated, primals, cotangents)
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "tensor"), axis_types=(kind,) * 3)

    def step(primals, cotangents):
        outputs, pull = jax.vjp(nag_update_modulated, *primals)
        return [*outputs, *pull(cotangents)]

    with jax.set_mesh(mesh):
        rows, whole = NamedSharding(mesh, P("data", "seq")), NamedSharding(mesh, P())
        primals = tuple(jax.device_put(x, whole if i > 2 else rows) for i, x in enumerate(primals))
        cotangents = jax.device_put(cotangents, rows)
        compiled = jax.jit(shard_rows(step, mesh, P("data", "seq"))).lower(primals, cotangents).compile()
        got = compiled(primals, cotangents)
    assert_close(jax.device_get(got), jax.device_get(want), terms=96, chain=8)
    text = compiled.as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    sizes = [line.split(" = ")[1].split("all-reduce")[0] for line in text.splitlines() if " all-reduce(" in line]
    assert sizes and not any("[2,2,96]" in size for size in sizes), sizes  # parameters alone, never rows


@pytest.mark.parametrize("platform,name", [("tpu", "mosaic_tpu"), ("cuda", "pallas_triton")])
def test_lowers_to_its_kernel(lower, platform, name):
    primals, cotangents = inputs(33, 640, "bfloat16")
    for chosen in (name, None):
        step = functools.partial(nag_oracle.with_gradients, implementation(chosen))
        assert lower(platform, step, primals, cotangents).count(CUSTOM_CALL[name]) == 2


def test_gate_and_update_in_two_steps_on_a_gpu():
    """`composed` is tested at one shape: its parts are XLA's gate and the kernel of `nag_update`."""
    primals, cotangents = inputs(7, 96, "float32")
    with interpreting():
        got = nag_oracle.with_gradients(implementation("composed"), primals, cotangents)
    assert_each_close(got, nag_oracle.exact(oracle, primals, cotangents), 96, "float32")


def test_gpu_kernel_with_a_large_mean_in_the_update():
    """The backward pass takes its statistics chunk by chunk, of a shifted update: at most as wrong as XLA's."""
    (r, s, u, *others), cotangents = inputs(5, 200, "float32")
    primals = (r, s, u + 300 * jnp.abs(u).max(-1, keepdims=True), *others)
    want = [np.asarray(x) for x in nag_oracle.exact(oracle, primals, cotangents)]
    names = NAMES.index("d_direction"), NAMES.index("d_update")
    off = {}
    for name in ("xla", "pallas_triton"):
        with interpreting(INTERPRETERS.get(name)):
            got = nag_oracle.with_gradients(implementation(name), primals, cotangents)
        off[name] = [np.abs(got[i] - want[i]).max() / np.abs(want[i]).max() for i in names]
    assert all(a < 2 * b + 1e-6 for a, b in zip(off["pallas_triton"], off["xla"], strict=True)), off


@pytest.mark.parametrize("name", ("mosaic_tpu", "pallas_triton"))
def test_too_many_gates_fall_back_or_say_why(lower, name):
    primals, _ = inputs(4, 64, "float32", gates=65)
    assert "tpu_custom_call" not in lower("tpu", nag_update_modulated, *primals)
    assert "nag_update_forward" in lower("cuda", nag_update_modulated, *primals)  # `composed`
    with pytest.raises(ValueError, match=f"{name}: C = 65; accepted: up to 64 gates"):
        implementation(name)(*primals)


def test_rows_too_wide_for_the_cache_are_composed_on_a_gpu(lower):
    primals, _ = inputs(1, 8192, "float32")
    assert "nag_update_forward" in lower("cuda", nag_update_modulated, *primals)
    with pytest.raises(ValueError, match="pallas_triton: D = 8192; accepted: up to 4096"):
        implementation("pallas_triton")(*primals)
    narrow = tuple(jnp.asarray(x, jnp.bfloat16) if i in (0, 2) else x for i, x in enumerate(primals))
    assert "nag_update_modulated_forward" in lower("cuda", nag_update_modulated, *narrow)


def test_bad_arguments_are_named():
    primals, _ = inputs(4, 64, "float32")
    with pytest.raises(ValueError, match=r"weight = float32\[63, 8\]; accepted: \[D C\] with \{'D': 64\}"):
        nag_update_modulated(*primals[:3], primals[3][:63], *primals[4:])
