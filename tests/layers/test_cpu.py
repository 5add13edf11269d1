"""The branches as a CPU runs them, values and gradients, against the plain formulas differentiated by JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.layers import cpu
from nagjax.layers.attention import Attention, unit_rms
from nagjax.layers.mlp import MLP
from nagjax.layers.parameters import Scales
from nagjax.layers.platform import tracing_for
from nagjax.layers.rotary import rotary, turns
from nagjax.layers.where import Where, seen_mask
from nagjax.model.config import ModelConfig

# Both sides are in float64: some ten operations deep over sums of at most 100 terms, 1e3 roundings at the very most.
EXACT = 1e3 * np.finfo(np.float64).eps
# In float32 the same, for values of the order of one; sums of n roundings of random sign grow as sqrt(n).
ROUNDED = 64 * np.finfo(np.float32).eps


def draw(*shapes, dtype=np.float64, seed=0):
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]


def compare(mine, plain, arguments, tolerance):
    """Values, and gradients of the same random weighting of them."""

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, *arguments):
        value, back = jax.vjp(function, *arguments)
        weighting = jax.tree.map(lambda x: draw(x.shape, dtype=x.dtype, seed=1)[0], value)
        return value, back(weighting)

    found, wanted = both(mine, *arguments), both(plain, *arguments)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.max(np.abs(b)))


def where_of(batch, tokens, documents=2):
    """Rows of several documents, the last one padding."""
    lengths = np.linspace(0, tokens, documents + 1).astype(int)
    row = np.searchsorted(lengths, np.arange(tokens), side="right")
    positions = np.arange(tokens) - lengths[row - 1]
    whole = lambda x: jnp.asarray(np.broadcast_to(x, (batch, tokens)), jnp.int32)  # noqa: E731
    return Where(whole(np.where(row == documents, 0, row)), whole(positions))


def plain_swiglu(x, gate, up, down):
    return ((jax.nn.silu(x @ gate) * (x @ up)) @ down,)


def plain_attention(q, k, v, seen):
    """q [B, H, T, Dh], scaled; k, v [B, K, S, Dh]."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    shares = jax.nn.softmax(jnp.where(seen, jnp.einsum("bhtd,bhsd->bhts", q, k), -jnp.inf), axis=-1)
    mixed = jnp.einsum("bhts,bhsd->bthd", shares, v)
    return mixed.reshape(*mixed.shape[:2], -1)


def plain_placed(x, positions, epsilon, scale):
    return scale * rotary(unit_rms(x, epsilon), positions).swapaxes(1, 2)


def test_swiglu():
    with jax.enable_x64(True):
        compare(cpu.swiglu, plain_swiglu, draw((2, 5, 8), (8, 24), (8, 24), (24, 8)), EXACT)


def test_swiglu_with_products_of_other_weights():
    def plain(x, gate, up, down, *others):
        return *plain_swiglu(x, gate, up, down), *(x @ other for other in others)

    with jax.enable_x64(True):
        compare(cpu.swiglu, plain, draw((2, 5, 8), (8, 24), (8, 24), (24, 8), (8, 3), (8, 1)), EXACT)


def test_swiglu_in_float32_and_for_large_gates():
    x, gate, up, down = draw((2, 5, 8), (8, 24), (8, 24), (24, 8), dtype=np.float32)
    compare(cpu.swiglu, plain_swiglu, (x, gate, up, down), ROUNDED)
    value, back = jax.vjp(cpu.swiglu, x, 100.0 * gate, up, down)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((value, back(value))))


def test_matmuls():
    with jax.enable_x64(True):
        plain = lambda x, *weights: tuple(x @ w for w in weights)  # noqa: E731
        compare(cpu.matmuls, plain, draw((2, 5, 8), (8, 3), (8, 4), (8, 3)), EXACT)
        compare(cpu.matmuls, plain, draw((2, 5, 8), (8, 3)), EXACT)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("heads", "keys", "window"), [(2, 2, None), (4, 2, None), (3, 1, 3)])
def test_attention(bounded, heads, keys, window):
    with jax.enable_x64(True):
        where = where_of(2, 9)
        seen, by_key = (seen_mask(where, where, window, by_key=by_key) for by_key in (False, True))
        q, k, v = draw((2, heads, 9, 4), (2, keys, 9, 4), (2, keys, 9, 4))
        mine = lambda q, k, v: cpu.attention(q, k, v, seen, by_key, bounded)  # noqa: E731
        compare(mine, functools.partial(plain_attention, seen=seen), (q, k, v), EXACT)


def test_attention_by_spans_is_that_of_the_whole_square():
    with jax.enable_x64(True):
        where = where_of(2, 12, documents=3)
        seen, by_key = (seen_mask(where, where, by_key=by_key) for by_key in (False, True))
        # padding sees padding, but not further on in the row
        seen, by_key = seen & jnp.tri(12, dtype=bool), by_key & jnp.tri(12, dtype=bool).T
        q, k, v = draw((2, 4, 12, 4), (2, 2, 12, 4), (2, 2, 12, 4))
        for spans in (2, 4):
            mine = lambda q, k, v, spans=spans: cpu.attention(q, k, v, seen, by_key, True, spans)  # noqa: E731
            compare(mine, functools.partial(plain_attention, seen=seen), (q, k, v), EXACT)
    assert [cpu.spans_of(n) for n in (8, 256, 511, 512, 514, 1024)] == [1, 1, 1, 4, 1, 4]


def test_attention_subtracts_the_largest_score_where_scores_have_no_bound():
    where = Where.whole(1, 6)
    q, k, v = (100.0 * x for x in draw((1, 1, 6, 4), (1, 1, 6, 4), (1, 1, 6, 4), dtype=np.float32))
    masks = seen_mask(where, where), seen_mask(where, where, by_key=True)
    value, back = jax.vjp(lambda q, k, v: cpu.attention(q, k, v, *masks, False), q, k, v)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in (value, *back(value)))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_norm_and_rotation(scale):
    with jax.enable_x64(True):
        (x,), positions = draw((2, 7, 3, 8)), where_of(2, 7).positions
        cos, sin = (angle.astype(jnp.float64) for angle in turns(positions, 4, 10_000.0))
        mine = lambda x: cpu.placed(x, cos, sin, 1e-3, scale)  # noqa: E731
        # The plain formula works in float32: x1 cos - x2 sin rounds three times, the norm some ten.
        compare(mine, lambda x: plain_placed(x, positions, 1e-3, scale), (x,), ROUNDED)


def test_masks_are_each_other_with_axes_swapped():
    queries, keys = where_of(2, 5), where_of(2, 8, documents=3)
    for window in (None, 2):
        ours, theirs = seen_mask(queries, keys, window), seen_mask(queries, keys, window, by_key=True)
        np.testing.assert_array_equal(ours, theirs.swapaxes(2, 3))


def branch_and_gradients(config, platform, seed=0):
    """Attention's value and all gradients, as traced for a platform."""
    module = Attention(config, Scales(), nnx.Rngs(seed))
    (x,), where = draw((2, 16, config.width), dtype=np.float32), where_of(2, 16)
    graph, state = nnx.split(module)

    def run(state, x):
        update, _ = nnx.merge(graph, state)(x, where)
        return jnp.sum(jnp.sin(update)), update

    with tracing_for(platform):
        return jax.jit(jax.grad(run, argnums=(0, 1), has_aux=True))(state, x)


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_heads": 2}, {"qk_norm": False}, {"positions": "learned"}],
    ids=["plain", "grouped", "no_norm", "learned"],
)
def test_the_attention_branch_is_the_same_on_every_platform(options):
    config = ModelConfig(depth=1, width=32, heads=4, context=16, dtype="float32", **options)
    mine, other = (jax.tree.leaves(branch_and_gradients(config, platform)) for platform in ("cpu", "gpu"))
    for a, b in zip(mine, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=ROUNDED, atol=ROUNDED * np.max(np.abs(b)))


def jaxpr_of_swiglu(platform: str) -> str:
    mlp, (x,) = MLP("swiglu", 8, 24, Scales(), nnx.Rngs(0)), draw((2, 4, 8), dtype=np.float32)
    with tracing_for(platform):
        return str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(mlp(x))))(x))


def test_other_platforms_get_the_plain_formula():
    assert "optimization_barrier" in jaxpr_of_swiglu("cpu")
    for platform in ("gpu", "tpu"):
        assert "optimization_barrier" not in jaxpr_of_swiglu(platform)


def test_an_exponential_is_taken_once_a_pass():
    """One in the forward pass and one in the backward pass, however many loops read it."""
    arguments = draw((8, 128, 64), (64, 176), (64, 176), (176, 64), dtype=np.float32)
    step = jax.jit(lambda *a: jax.vjp(cpu.swiglu, *a)[1]((a[0],)))
    text = step.lower(*arguments).compile().as_text()
    assert 1 <= text.count(" exponential(") + text.count(" logistic(") + text.count(" tanh(") <= 2
