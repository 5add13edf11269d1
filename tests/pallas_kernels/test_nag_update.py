"""Values, gradients and invariants of the NAG update."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nag_update
from pallas_kernels.launch import interpreting, tracing_for
from pallas_kernels.shapes import COVER, COVER_SMALL, COVER_WIDE
from tests.pallas_kernels import nag_oracle
from tests.pallas_kernels.kernel_lowering import CUSTOM_CALL, INTERPRETERS
from tests.tolerance import assert_close

NAMES = ("direction", "log_norm", "d_direction", "d_log_norm", "d_update", "d_turn")


@functools.cache  # a function of its own would be compiled again
def implementation(name):
    return lambda *args: nag_update(*args, implementation=name)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("xla", shape) for shape in COVER[1::2]] + [(None, shape) for shape in COVER_SMALL[:2]],
    ids=str,
)
def test_xla_against_float64(name, shape):
    """None: programs of other platforms, whose kernels keep nothing, are there, too."""
    primals, cotangents = nag_oracle.inputs(*shape)
    got = nag_oracle.with_gradients(implementation(name), primals, cotangents)
    chex.assert_trees_all_equal_shapes_and_dtypes(tuple(got[2:]), primals)
    nag_oracle.assert_close(NAMES, got, nag_oracle.exact(nag_oracle.update, primals, cotangents), shape[1])


@pytest.mark.parametrize("shape", COVER_SMALL[2:], ids=str)
def test_reference_against_float64(shape):
    primals, cotangents = nag_oracle.inputs(*shape)
    got = nag_oracle.with_gradients(implementation("reference"), primals, cotangents)
    nag_oracle.assert_close(NAMES, got, nag_oracle.exact(nag_oracle.update, primals, cotangents), shape[1])


@pytest.mark.parametrize("name", INTERPRETERS)
@pytest.mark.parametrize("shape", COVER_SMALL + COVER_WIDE, ids=str)
def test_kernel_interpreted_against_float64(name, shape):
    primals, cotangents = nag_oracle.inputs(*shape)
    with interpreting(INTERPRETERS[name]):
        got = nag_oracle.with_gradients(implementation(name), primals, cotangents)
    nag_oracle.assert_close(NAMES, got, nag_oracle.exact(nag_oracle.update, primals, cotangents), shape[1])


@pytest.mark.parametrize("name", INTERPRETERS)
def test_kernel_interpreted_over_several_blocks(name):
    primals, cotangents = nag_oracle.inputs(300, 128, "float32")
    with interpreting(INTERPRETERS[name]):
        got = nag_oracle.with_gradients(implementation(name), primals, cotangents)
    nag_oracle.assert_close(NAMES, got, nag_oracle.exact(nag_oracle.update, primals, cotangents), 128)


EDGES = {
    "zero update": lambda r, u: (r, 0 * u),
    "negative zero update": lambda r, u: (r, -0.0 * jnp.abs(u)),
    "constant update": lambda r, u: (r, 0 * u + 3),
    "zero direction": lambda r, u: (0 * r, u),
    "both zero": lambda r, u: (0 * r, 0 * u),
    "huge update": lambda r, u: (r, 1e15 * u),
    "tiny update": lambda r, u: (r, 1e-4 * u),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", ("reference", "xla", *INTERPRETERS))
def test_edges_match_float64_and_stay_finite(name, edge):
    # A sum times a rounded 1/96 is not the mean of equal numbers, and what is left of them would be turned to.
    width = 128 if edge == "constant update" else 96
    (r, s, u, t), cotangents = nag_oracle.inputs(5, width, "float32")
    u = u / jnp.sqrt(jnp.mean(u * u, -1, keepdims=True))
    r, u = EDGES[edge](r, u)
    if (name, edge) == ("reference", "huge update"):
        u = 1e-6 * u  # JAX's derivative of rsqrt takes the third power of the norm, and underflows earlier
    primals = (r, s, u, t)
    with interpreting(INTERPRETERS.get(name)):
        got = nag_oracle.with_gradients(implementation(name), primals, cotangents)
    chex.assert_tree_all_finite(got)
    if "update" in edge and edge.split()[0] in ("zero", "negative", "constant"):
        assert_close(got[0], r, terms=1, chain=4)
        assert_close(got[1], s + 0.5 * np.log1p(np.square(t)), terms=1, chain=4)
    if edge != "constant update":  # its float32 remainder is rounding noise, which no two ways agree on
        want = nag_oracle.exact(nag_oracle.update, primals, cotangents)
        sums = 128 if edge == "zero direction" else 32  # where turning changes nothing, d_turn cancels to zero
        nag_oracle.assert_close(NAMES, got, want, width, sums)


@pytest.mark.parametrize("name", ("reference", "xla", *INTERPRETERS))
def test_no_update_does_not_rule_the_gradient(name):
    """A row with a zero update has a gradient that is no larger than the incoming one and not 0: it can learn."""
    (r, s, u, t), cotangents = nag_oracle.inputs(8, 128, "float32")
    t = 0.1 + jnp.abs(t)
    u = u.at[0].set(0.0).at[1].set(1e-8 * u[1]).at[2].set(3.0)
    with interpreting(INTERPRETERS.get(name)):
        got = nag_oracle.with_gradients(implementation(name), (r, s, u, t), cotangents)
    size = lambda x: np.sqrt(np.mean(np.square(np.asarray(x[:3], np.float64)), axis=-1))  # noqa: E731
    du, g = size(got[NAMES.index("d_update")]), size(cotangents[0])
    assert np.all(du < 3 * t[:3] * g) and np.all(du > 0.1 * t[:3] * g)


@pytest.mark.parametrize("name", ("reference", "xla", *INTERPRETERS))
def test_rows_of_zeros_do_not_rule_the_gradient(name):
    """A factor of 1 / rms in every sublayer would overflow after a few of them."""
    (r, s, u, t), cotangents = nag_oracle.inputs(8, 128, "float32")
    with interpreting(INTERPRETERS.get(name)):
        got = nag_oracle.with_gradients(implementation(name), (0 * r, s, 0 * u, t), cotangents)
    np.testing.assert_array_equal(got[0], 0 * r)
    assert_close(got[NAMES.index("d_direction")], cotangents[0], terms=1, chain=4)


def test_parallel_update_leaves_nothing_to_turn_to():
    (r, s, _, t), cotangents = nag_oracle.inputs(5, 640, "float32")
    r = r - r.mean(-1, keepdims=True)
    r = r / jnp.sqrt(jnp.mean(r * r, -1, keepdims=True))
    got = nag_oracle.with_gradients(implementation("xla"), (r, s, 2 * r, 0.1 + 0 * t), cotangents)
    chex.assert_tree_all_finite(got)
    np.testing.assert_allclose(jnp.mean(got[0] ** 2, -1), 1, rtol=1e-5)


def test_direction_keeps_unit_rms_over_256_sublayers_in_bfloat16():
    (r, s, _, _), _ = nag_oracle.inputs(64, 640, "bfloat16")
    turn = jnp.full((64,), 0.3)

    def sublayer(state, key):
        u = jax.random.normal(key, r.shape, jnp.bfloat16)
        r0, s0 = state
        r1, s1 = nag_update(r0, s0, u, turn)
        return (r1, s1), jnp.sqrt(jnp.mean(r1.astype(jnp.float32) ** 2, -1))

    (_, s_end), rms = jax.jit(lambda: jax.lax.scan(sublayer, (r, s), jax.random.split(jax.random.key(1), 256)))()
    one_ulp = float(jnp.finfo(jnp.bfloat16).eps)
    assert float(jnp.abs(rms - 1).max()) < one_ulp
    assert float(jnp.abs(rms[-1] - 1).max()) < one_ulp / 4  # and it does not drift
    assert_close(s_end - s, 256 * 0.5 * np.log1p(0.09), terms=256, chain=1)


def test_geometry():
    """What is added is orthogonal to the direction; the angle is arctan(t), the growth sqrt(1 + t^2)."""
    (r, s, u, t), _ = nag_oracle.inputs(32, 4096, "float32")
    out, log_norm = nag_update(r, s, u, t)
    cosine = jnp.mean(out * r, -1)
    assert_close(cosine, np.cos(np.arctan(np.asarray(t))), terms=1, chain=4)
    assert_close(jnp.exp(log_norm - s), np.hypot(1, np.asarray(t)), terms=1, chain=4)
    added = jnp.exp(log_norm - s)[:, None] * out - r
    assert_close(jnp.mean(added * r, -1), 0, terms=1, chain=16, scale=1.0)


@pytest.mark.parametrize(("platform", "kept"), [(None, 0), ("tpu", 0), ("cpu", 4)])
def test_saves_its_inputs_and_on_a_cpu_four_numbers_a_row(platform, kept):
    primals, _ = nag_oracle.inputs(16, 128, "bfloat16")
    with tracing_for(platform):
        pull = jax.eval_shape(lambda *args: jax.vjp(nag_update, *args)[1], *primals)
    assert nag_oracle.nbytes(pull) == nag_oracle.nbytes([primals[i] for i in (0, 2, 3)]) + kept * 16 * 4


def test_scan_and_remat_change_nothing():
    (r, s, _, t), (g, ds) = nag_oracle.inputs(6, 96, "float32")
    updates = jax.random.normal(jax.random.key(2), (2, 6, 96))

    def loop(body, unroll):
        def loss(r, updates, t):
            def step(state, u):
                return body(*state, u, t), None

            (r1, s1), _ = jax.lax.scan(step, (r, s), updates, unroll=unroll)
            return jnp.sum(r1 * g) + jnp.sum(s1 * ds)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(r, updates, t)

    want = loop(implementation("reference"), True)
    for body in (nag_update, jax.checkpoint(nag_update, prevent_cse=False)):
        assert_close(loop(body, 1), want, terms=96, chain=8)


def test_any_leading_dimensions_and_vmap():
    (r, s, u, t), _ = nag_oracle.inputs(24, 96, "float32")
    want = nag_update(r, s, u, t)
    folded = nag_update(r.reshape(2, 3, 4, 96), s.reshape(2, 3, 4), u.reshape(2, 3, 4, 96), t.reshape(2, 3, 4))
    assert_close(jax.tree.map(lambda x: x.reshape(24, *x.shape[3:]), folded), want, terms=96, chain=2)
    assert_close(jax.vmap(nag_update)(r, s, u, t), want, terms=96, chain=2)


def test_reference_has_forward_mode():
    (r, s, u, t), _ = nag_oracle.inputs(4, 64, "float32")
    _, tangent = jax.jvp(implementation("reference"), (r, s, u, t), (r, s, u, t))
    chex.assert_tree_all_finite(tangent)


@pytest.mark.parametrize("platform,name", [("tpu", "mosaic_tpu"), ("cuda", "pallas_triton")])
def test_lowers_to_its_kernel(lower, platform, name):
    primals, cotangents = nag_oracle.inputs(9, 640, "bfloat16")
    for chosen in (name, None):
        call = implementation(chosen)
        assert lower(platform, call, *primals).count(CUSTOM_CALL[name]) == 1
        step = functools.partial(nag_oracle.with_gradients, call)
        assert lower(platform, step, primals, cotangents).count(CUSTOM_CALL[name]) == 2


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(update=jnp.zeros((3, 65))), r"update = float32\[3, 65\].*'D': 64"),
        (dict(turn=jnp.zeros((4,))), r"turn = float32\[4\]"),
        (dict(turn=jnp.zeros((3,), jnp.bfloat16)), r"turn = bfloat16\[3\]; accepted: float32"),
        (dict(update=jnp.zeros((3, 64), int)), r"update = int32\[3, 64\]; accepted: a floating dtype"),
    ],
)
def test_bad_arguments_are_named(change, message):
    good = dict(direction=jnp.ones((3, 64)), log_norm=jnp.ones(3), update=jnp.ones((3, 64)), turn=jnp.ones(3))
    with pytest.raises(ValueError, match=message):
        nag_update(**{**good, **change})
