"""A scheme's projection as extra columns of the branch's first product: traced for a CPU and a GPU, run on this CPU."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.layers.attention import Attention
from nagjax.layers.branch import Update, narrowed
from nagjax.layers.compressed import CompressedAttention
from nagjax.layers.config import BlockConfig, MoEConfig
from nagjax.layers.experts import Experts
from nagjax.layers.extra_columns import ExtraColumns, extra_columns, offering
from nagjax.layers.int8 import Quantized, quantized
from nagjax.layers.mlp import ACTIVATIONS, MLP
from nagjax.layers.parameters import Scales
from nagjax.layers.platform import tracing_for
from nagjax.layers.where import Where
from nagjax.model.config import ModelConfig
from nagjax.residual import Boundary, find_scheme
from nagjax.residual.protocol import SublayerIndex
from nagjax.residual.sublayer import run
from tests.layers.test_cpu import ROUNDED, draw
from tests.tolerance import assert_close

BATCH, TOKENS, WIDTH, HIDDEN, GATES = 2, 64, 8, 12, 4  # more rows than any branch's first product has columns
NAG = find_scheme("nag")(directions=GATES, ramp=0.0)
COMPUTED = {  # branches that have their first weights side by side
    "cpu": ("attention", "cca", "swiglu"),
    "gpu": ("attention", "experts", *ACTIVATIONS),
    "tpu": (),
}
KINDS = ("attention", "cca", "experts", *ACTIVATIONS)
CASES = [(kind, platform) for platform, kinds in COMPUTED.items() for kind in kinds]


def make(kind: str, **changes):
    """A branch, and how it is called."""
    if kind in ("attention", "cca"):
        block = BlockConfig(cca=True, head_width=4) if kind == "cca" else BlockConfig()
        sizes = dict(depth=1, width=WIDTH, heads=2, context=TOKENS, dtype="float32", attention="auto", block=block)
        module = (CompressedAttention if kind == "cca" else Attention)(
            ModelConfig(**sizes | changes), Scales(), nnx.Rngs(0)
        )
        return module, lambda own, x: own(x, Where.whole(*x.shape[:2]))[0]
    if kind == "experts":
        config = MoEConfig(3, 2, shared=1, hidden=HIDDEN)
        return Experts(WIDTH, config, "swiglu", Scales(), nnx.Rngs(0)), lambda own, x: own(x)
    return MLP(kind, WIDTH, HIDDEN, Scales(), nnx.Rngs(0), **changes), lambda own, x: own(x)


def step(kind: str, platform: str, dtype: str = "float32", stream: str = "float32"):
    """A sublayer, from parameters of branch and modulator and the embedding to the stream and a scalar of it."""
    module, call = make(kind)
    graph, state = nnx.split(module)
    gate_graph, gate = nnx.split(NAG.gate(WIDTH, SublayerIndex(1, 2), nnx.Rngs(1)))
    gate = jax.tree.map(lambda x: x + 0.1, gate)  # biases start at 0
    (x,) = draw((BATCH, TOKENS, WIDTH), dtype=np.float32)
    x = x.astype(stream)

    def sublayer(state, gate, x):
        branch = narrowed(functools.partial(call, nnx.merge(graph, state)), dtype, stream)
        at = Boundary(nnx.merge(gate_graph, gate), None, jnp.int32(1), jnp.int32(2), jnp.float32(1.0), 2)
        begin = NAG.open(x, at, NAG.ends(WIDTH, 1.0, nnx.Rngs(2)))
        result = run(NAG, begin, lambda x: Update(branch(x)), at)
        return jnp.sum(jnp.sin(result.stream.direction)) + jnp.sum(result.stream.log_norm), (result.stream, result.gate)

    @jax.jit
    def both(state, gate, x):
        with tracing_for(platform):
            return jax.value_and_grad(sublayer, argnums=(0, 1, 2), has_aux=True)(state, gate, x)

    return both, (state, gate, x)


def products(function, arguments) -> int:
    text = jax.jit(function).lower(*arguments).as_text()
    return len(re.findall(r"stablehlo.dot_general", text))


@pytest.mark.parametrize("kind, platform", CASES)
def test_the_sublayer_is_that_of_a_projection_by_itself(kind, platform, monkeypatch):
    function, arguments = step(kind, platform)
    mine = function(*arguments)
    monkeypatch.setattr(type(NAG), "projection", lambda self, stream, at: None)
    apart = step(kind, platform)[0](*arguments)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(a, b, rtol=ROUNDED, atol=ROUNDED * max(1.0, float(np.max(np.abs(b)))))


@pytest.mark.parametrize(
    "kind, platform, changes",
    [
        ("attention", "cpu", {"block": BlockConfig(biases=("qkv",))}),
        ("attention", "gpu", {"block": BlockConfig(biases=("qkv",))}),
        ("swiglu", "gpu", {"biases": True}),
    ],
)
def test_beside_biases(kind, platform, changes):
    module, call = make(kind, **changes)
    state = jax.tree.map(lambda leaf: leaf + 0.1, nnx.state(module))
    nnx.update(module, state)
    x, weight = draw((BATCH, TOKENS, WIDTH), (WIDTH, GATES), dtype=np.float32)
    with tracing_for(platform):
        alone = call(module, x)
        with offering(extra := ExtraColumns(x, weight)):
            both = call(module, x)
    np.testing.assert_allclose(both, alone, rtol=ROUNDED, atol=ROUNDED * float(jnp.max(jnp.abs(alone))))
    np.testing.assert_allclose(extra.product, x @ weight, rtol=ROUNDED, atol=ROUNDED)


@dataclasses.dataclass(frozen=True)
class Halved(type(NAG)):
    """A scheme whose branches read another array than its gate."""

    def read(self, stream):
        return 0.5 * stream.direction


def test_a_gate_reads_the_schemes_own_rows_whatever_the_branch_reads():
    scheme, (module, call) = Halved(directions=GATES, ramp=0.0), make("swiglu")
    gate = scheme.gate(WIDTH, SublayerIndex(1, 2), nnx.Rngs(1))
    (x,) = draw((BATCH, TOKENS, WIDTH), dtype=np.float32)
    at = Boundary(gate, None, jnp.int32(1), jnp.int32(2), jnp.float32(1.0), 2)
    stream = scheme.open(x, at, scheme.ends(WIDTH, 1.0, nnx.Rngs(2)))
    for platform in ("cpu", "gpu"):
        with tracing_for(platform):
            found = run(scheme, stream, lambda x: Update(call(module, x)), at).gate[..., 0]
        np.testing.assert_allclose(found, gate(stream.direction), rtol=ROUNDED, atol=ROUNDED)
        assert np.max(np.abs(found - gate(scheme.read(stream)))) > 100 * ROUNDED


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_in_bfloat16_the_projection_is_rounded_as_the_branch_is(platform, monkeypatch):
    """A product of `WIDTH` numbers, rounded; gate and stream follow it with slopes below one."""
    function, arguments = step("swiglu", platform, "bfloat16", "bfloat16")
    (_, (stream, gate)), (_, slopes, _) = function(*arguments)
    joined = products(function, arguments)
    monkeypatch.setattr(type(NAG), "projection", lambda self, stream, at: None)
    apart = step("swiglu", platform, "bfloat16", "bfloat16")[0]
    (_, (other_stream, other)), (_, others, _) = apart(*arguments)
    assert products(apart, arguments) > joined
    assert_close(gate, other, terms=WIDTH, dtype=jnp.bfloat16)
    assert_close(stream.log_norm, other_stream.log_norm, terms=WIDTH, scale=1.0, dtype=jnp.bfloat16)
    for a, b in zip(jax.tree.leaves(slopes), jax.tree.leaves(others), strict=True):
        assert_close(a, b, terms=WIDTH, chain=4, dtype=jnp.bfloat16)


@pytest.mark.parametrize("platform", COMPUTED)
@pytest.mark.parametrize("kind", KINDS)
def test_which_branches_compute_them(kind, platform):
    module, call = make(kind)
    x, weight = draw((BATCH, TOKENS, WIDTH), (WIDTH, GATES), dtype=np.float32)
    with tracing_for(platform), offering(extra := ExtraColumns(x, weight)):
        call(module, x)
    assert (extra.product is not None) == (kind in COMPUTED[platform])
    if extra.product is not None:
        np.testing.assert_allclose(extra.product, x @ weight, rtol=ROUNDED, atol=ROUNDED)


@pytest.mark.parametrize("kind, platform", CASES)
def test_the_modulator_has_no_product_with_the_rows_of_its_own(kind, platform):
    """Neither forward nor for the two gradients. What is left of its own is the mixture, with one vector."""
    alone = make(kind)

    def branch(state, x):
        with tracing_for(platform):
            run_alone = lambda state, x: jnp.sum(jnp.sin(alone[1](nnx.merge(graph, state), x)))  # noqa: E731
            return jax.value_and_grad(run_alone, argnums=(0, 1))(state, x)

    graph, state = nnx.split(alone[0])
    function, (own, gate, x) = step(kind, platform)
    mixture = 3  # with the shares: forward, and for both gradients
    assert products(function, (own, gate, x)) == products(branch, (state, x)) + mixture


def test_not_of_other_rows_and_not_twice():
    x, weight = draw((BATCH, TOKENS, WIDTH), (WIDTH, GATES), dtype=np.float32)
    assert extra_columns(x) is None
    with offering(extra := ExtraColumns(x, weight)):
        assert extra_columns(x) is extra and extra_columns(x + 0) is None
        extra.product = x @ weight
        assert extra_columns(x) is None
        with offering(None):
            assert extra_columns(x) is None
    assert extra_columns(x) is None


def test_a_branch_in_another_dtype_leaves_the_projection_to_the_scheme():
    exact, narrow = (step("swiglu", "cpu", dtype) for dtype in ("float32", "bfloat16"))
    assert products(*narrow) > products(*exact)


def test_quantised_weights_stay_by_themselves():
    module, call = make("swiglu")
    for name in ("gate", "up", "down"):
        setattr(module, name, nnx.data({...: quantized(getattr(module, name)[...])}))
    x, weight = draw((BATCH, TOKENS, WIDTH), (WIDTH, GATES), dtype=np.float32)
    assert isinstance(module.gate[...], Quantized)
    for platform in ("cpu", "gpu"):
        with tracing_for(platform), offering(extra := ExtraColumns(x, weight)):
            call(module, x)
        assert extra.product is None


def test_of_few_rows_a_gpu_keeps_the_products_apart():
    module, call = make("swiglu")
    x, weight = draw((1, HIDDEN, WIDTH), (WIDTH, GATES), dtype=np.float32)
    with tracing_for("gpu"), offering(extra := ExtraColumns(x, weight)):
        call(module, x)
    assert extra.product is None


def test_not_inside_a_transformation():
    """An ensemble of MLPs that close over what they read."""
    module, call = make("swiglu")
    graph, state = nnx.split(module)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2.0 * leaf]), state)
    x, weight = draw((BATCH, TOKENS, WIDTH), (WIDTH, GATES), dtype=np.float32)
    for platform in ("cpu", "gpu"):
        with tracing_for(platform), offering(extra := ExtraColumns(x, weight)):
            ensemble = jax.vmap(lambda state: call(nnx.merge(graph, state), x))(several)
            assert extra.product is None
            call(module, x)
        assert ensemble.shape == (2, *x.shape) and extra.product is not None
