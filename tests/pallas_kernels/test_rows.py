"""Taking, putting and updating rows by index."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import checking_indices, nag_update_rows, put_rows, shard_rows, take_rows, using
from pallas_kernels.launch import interpreting
from tests.pallas_kernels import nag_oracle
from tests.pallas_kernels.kernel_lowering import CUSTOM_CALL, INTERPRETERS, PLATFORM
from tests.tolerance import assert_close

SHAPES = ((1, 9, 4, 96, "float32"), (3, 16, 5, 100, "bfloat16"), (2, 40, 40, 128, "float32"))
NAMES = ("reference", "xla", "mosaic_tpu", "pallas_triton")
CASES = [  # kernels cut rows into blocks and lanes, XLA's programs are the same for any shape
    *((name, SHAPES[1]) for name in ("reference", "xla")),
    *((name, shape) for name in PLATFORM for shape in SHAPES),
]


def interpret(name):
    return interpreting(INTERPRETERS.get(name))


def inputs(groups, n, k, d, dtype, seed=3):
    random = np.random.default_rng(seed)
    indices = jnp.asarray([random.permutation(n)[:k] for _ in range(groups)], jnp.int32)
    x, rows, g = (jnp.asarray(random.standard_normal((groups, m, d)), dtype) for m in (n, k, n))
    return x, rows, indices, g


@pytest.mark.parametrize("name, shape", CASES, ids=str)
def test_take(name, shape):
    x, g, indices, _ = inputs(*shape)
    with interpret(name):
        out, (dx,) = jax.jit(
            lambda x, g: (lambda o, f: (o, f(g)))(*jax.vjp(lambda x: take_rows(x, indices, implementation=name), x))
        )(x, g)
    want = np.zeros(x.shape, x.dtype)
    for b, row in enumerate(np.asarray(indices)):
        np.testing.assert_array_equal(out[b], x[b][row])
        want[b][row] = g[b]
    np.testing.assert_array_equal(dx, want)


@pytest.mark.parametrize(
    "name, shared",
    [(name, None) for name in NAMES] + [(name, part) for name in PLATFORM for part in ("x", "indices")],
)
def test_under_vmap_as_one_by_one(name, shared):
    """The TPU's kernels see one array of rows, whose places say whose they are."""
    many = [inputs(1, 9, 4, 128, "float32", seed) for seed in range(3)]
    x, rows, indices, _ = (jnp.stack(parts) for parts in zip(*many, strict=True))
    given, axes = {"x": x, "rows": rows, "indices": indices}, dict.fromkeys(("x", "rows", "indices"), 0)
    if shared:
        given[shared], axes[shared] = given[shared][0], None

    def take(x, rows, indices):
        loss = lambda x: jnp.sum(rows * take_rows(x, indices, implementation=name))  # noqa: E731
        return take_rows(x, indices, implementation=name), jax.grad(loss)(x)

    def put(x, rows, indices):
        return put_rows(x, rows, indices, implementation=name)

    for op in (take, put):
        with interpret(name):
            found = jax.jit(jax.vmap(op, in_axes=tuple(axes.values())))(*given.values())
            for i in range(3):
                one = [v if own is None else v[i] for v, own in zip(given.values(), axes.values(), strict=True)]
                jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda v, i=i: v[i], found), op(*one))


@pytest.mark.parametrize("name", PLATFORM)
def test_lowers_under_vmap(lower, name):
    """By the kernels that are chosen there."""
    x, rows, indices, _ = (jnp.stack([part] * 3) for part in inputs(1, 16, 8, 128, "float32"))
    log_norm, turn = jnp.zeros(x.shape[:-1]), jnp.ones(rows.shape[:-1])
    steps = {
        "take": (take_rows, (x, indices)),
        "gradient": (jax.grad(lambda x, i: jnp.sum(take_rows(x, i))), (x, indices)),
        "put": (put_rows, (x, rows, indices)),
        "update": (nag_update_rows, (x, log_norm, rows, turn, indices)),
    }
    for op, arguments in steps.values():
        assert CUSTOM_CALL[name] in lower(PLATFORM[name], jax.vmap(op), *arguments)


@pytest.mark.parametrize("name, shape", CASES, ids=str)
def test_put(name, shape):
    x, rows, indices, g = inputs(*shape)
    with interpret(name):
        out, (dx, drows) = jax.jit(
            lambda x, rows, g: (lambda o, f: (o, f(g)))(
                *jax.vjp(lambda x, r: put_rows(x, r, indices, implementation=name), x, rows)
            )
        )(x, rows, g)
    want, d_want = np.array(x), np.array(g)
    for b, row in enumerate(np.asarray(indices)):
        want[b][row] = rows[b]
        d_want[b][row] = 0
        np.testing.assert_array_equal(drows[b], g[b][row])
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(dx, d_want)


def update_inputs(groups, n, k, d, dtype):
    (r, s, _, _), (g, ds) = nag_oracle.inputs(groups * n, d, dtype)
    (_, _, u, t), _ = nag_oracle.inputs(groups * k, d, dtype, seed=1)
    shape = lambda x, m: x.reshape(groups, m, *x.shape[1:])  # noqa: E731
    primals = shape(r, n), shape(s, n), shape(u, k), shape(t, k)
    return primals, (shape(g, n), shape(ds, n)), inputs(groups, n, k, d, dtype)[2]


def update_oracle(indices):
    def run(r, s, u, t):
        def group(r, s, u, t, i):
            new, lane = nag_oracle.update(r[i], s[i], u, t)
            return r.at[i].set(new), s.at[i].set(lane)

        return jax.vmap(group)(r, s, u, t, indices)

    return run


@pytest.mark.parametrize("name, shape", CASES, ids=str)
def test_update_of_selected_rows_against_float64(name, shape):
    primals, cotangents, indices = update_inputs(*shape)
    call = lambda *args: nag_update_rows(*args, indices, implementation=name)  # noqa: E731
    with interpret(name):
        got = nag_oracle.with_gradients(call, primals, cotangents)
    want = nag_oracle.exact(update_oracle(indices), primals, cotangents)
    names = ("direction", "log_norm", "d_direction", "d_log_norm", "d_update", "d_turn")
    nag_oracle.assert_close(names, got, want, shape[3])
    kept = np.ones(primals[1].shape, bool)
    np.put_along_axis(kept, np.asarray(indices), False, axis=1)
    np.testing.assert_array_equal(got[0][kept], primals[0][kept])
    np.testing.assert_array_equal(got[1][kept], primals[1][kept])


def test_update_saves_selected_rows_only():
    (r, s, u, t), _, indices = update_inputs(2, 64, 8, 128, "bfloat16")
    pull = jax.eval_shape(lambda *args: jax.vjp(nag_update_rows, *args, indices)[1], r, s, u, t)
    assert nag_oracle.nbytes(pull) == 2 * u.nbytes + t.nbytes + indices.nbytes


def test_update_reuses_the_memory_of_the_stream():
    (r, s, u, t), _, indices = update_inputs(2, 64, 8, 128, "float32")
    step = jax.jit(lambda *args: nag_update_rows(*args), donate_argnums=(0, 1)).lower(r, s, u, t, indices).compile()
    assert step.memory_analysis().alias_size_in_bytes == r.nbytes + s.nbytes


@pytest.mark.parametrize(
    "platform,name,calls",
    [("tpu", "mosaic_tpu", 2), ("cuda", "pallas_triton", 2)],
)
def test_update_lowers_to_its_kernel(lower, platform, name, calls):
    primals, cotangents, indices = update_inputs(2, 16, 5, 640, "bfloat16")
    for chosen in (name, None):
        call = lambda *args, chosen=chosen: nag_update_rows(*args, indices, implementation=chosen)  # noqa: E731
        step = functools.partial(nag_oracle.with_gradients, call)
        assert lower(platform, step, primals, cotangents).count(CUSTOM_CALL[name]) == calls


@pytest.mark.parametrize("platform,name", [("tpu", "mosaic_tpu"), ("cuda", "pallas_triton")])
def test_copies_lower_to_their_kernels(lower, platform, name):
    x, rows, indices, _ = inputs(2, 16, 5, 640, "float32")
    text = lower(platform, lambda x, r, i: (take_rows(x, i), put_rows(x, r, i)), x, rows, indices)
    assert text.count(CUSTOM_CALL[name]) == 2
    assert "output_operand_alias" in text


def test_sixteen_bit_rows_go_to_xla_on_tpu_unless_a_kernel_is_named(lower):
    """Two of them share the words of a tile, so they move in pairs."""
    x, rows, indices, _ = inputs(2, 16, 5, 640, "bfloat16")
    step = lambda x, r, i: (take_rows(x, i), put_rows(x, r, i))  # noqa: E731
    assert CUSTOM_CALL["mosaic_tpu"] not in lower("tpu", step, x, rows, indices)
    with using("mosaic_tpu"):
        assert lower("tpu", lambda *args: step(*args), x, rows, indices).count(CUSTOM_CALL["mosaic_tpu"]) == 2
    with pytest.raises(ValueError, match="take_rows: .*mosaic_tpu: float16 rows; accepted: float32, bfloat16"):
        narrow = jax.ShapeDtypeStruct(x.shape, jnp.float16)  # which XLA:CPU does not make without F16C
        jax.eval_shape(lambda x: take_rows(x, indices, implementation="mosaic_tpu"), narrow)


@pytest.mark.parametrize("n, k, d", [(33, 33, 100), (40, 17, 128)])
def test_pairs_of_rows_that_are_put_at_once(n, k, d):
    """Odd numbers of rows, and both rows of a pair put by one call, in one block or in two."""
    x, rows, indices, _ = inputs(1, n, k, d, "bfloat16")
    with interpret("mosaic_tpu"), using("mosaic_tpu"):
        taken, put = jax.jit(lambda x, r, i: (take_rows(x, i), put_rows(x, r, i)))(x, rows, indices)
    np.testing.assert_array_equal(taken[0], x[0][indices[0]])
    np.testing.assert_array_equal(put[0], x[0].at[indices[0]].set(rows[0]))


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_indices_stay_local_to_a_sequence_when_sharded(kind):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    primals, cotangents, indices = update_inputs(8, 16, 4, 64, "float32")

    def step(primals, cotangents, indices):
        (r, s), pull = jax.vjp(lambda *args: nag_update_rows(*args, indices), *primals)
        return r, s, put_rows(r, take_rows(r, indices), indices), pull(cotangents)

    want = jax.jit(step)(primals, cotangents, indices)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        args = jax.device_put((primals, cotangents, indices), NamedSharding(mesh, P("data")))
        compiled = jax.jit(shard_rows(step, mesh, "data")).lower(*args).compile()
        got = compiled(*args)
    assert_close(jax.device_get(got), jax.device_get(want), terms=64, chain=4)
    assert not any(name in compiled.as_text() for name in ("all-reduce", "all-gather", "collective-permute"))


def test_indices_are_checked_when_asked():
    x = jnp.ones((4, 64))
    with checking_indices():
        with pytest.raises(ValueError, match="take_rows: indices from 0 to 4; accepted: 0 to 3"):
            take_rows(x, jnp.array([0, 4], jnp.int32))
        with pytest.raises(ValueError, match="put_rows: indices hold 1 twice"):
            put_rows(x, x[:2], jnp.array([1, 1], jnp.int32))
        with pytest.raises(Exception, match="indices from -1 to 0"):
            jax.block_until_ready(jax.jit(lambda i: take_rows(x, i))(jnp.array([0, -1], jnp.int32)))
            jax.effects_barrier()
    take_rows(x, jnp.array([3, 0], jnp.int32))


def test_bad_arguments_are_named():
    x = jnp.ones((4, 64))
    with pytest.raises(ValueError, match=r"take_rows: indices = int16\[2\]; accepted: int32"):
        take_rows(x, jnp.array([0, 1], jnp.int16))
    with pytest.raises(ValueError, match=r"put_rows: rows = bfloat16\[2, 64\]; accepted: float32"):
        put_rows(x, x[:2].astype(jnp.bfloat16), jnp.array([0, 1], jnp.int32))
    with pytest.raises(ValueError, match=r"put_rows: indices = int32\[3\].*'k': 2"):
        put_rows(x, x[:2], jnp.array([0, 1, 2], jnp.int32))
