"""A scheme's projection as extra columns of the branch's first product: traced for a CPU and a GPU, run on this CPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_cpu import ROUNDED, draw

from nagjax.layers.attention import Attention
from nagjax.layers.branch import Update, narrowed
from nagjax.layers.extra_columns import Request, asked, asking
from nagjax.layers.int8 import Quantized, quantized
from nagjax.layers.mlp import MLPS
from nagjax.layers.parameters import Scales
from nagjax.layers.platform import tracing_for
from nagjax.layers.where import Where
from nagjax.model.config import ModelConfig
from nagjax.residual import Boundary, find_scheme
from nagjax.residual.protocol import SublayerIndex
from nagjax.residual.sublayer import run

BATCH, TOKENS, WIDTH, HIDDEN, GATES = 2, 64, 8, 12, 4  # more rows than any branch's first product has columns
NAG = find_scheme("nag")(directions=GATES, ramp=0.0)
ANSWERS = {  # branches that have their first weights side by side
    "cpu": ("attention", "swiglu"),
    "gpu": ("attention", *MLPS),
    "tpu": (),
}
KINDS = ("attention", *MLPS)


def make(kind: str):
    if kind == "attention":
        config = ModelConfig(depth=1, width=WIDTH, heads=2, context=TOKENS, dtype="float32", attention="auto")
        module = Attention(config, Scales(), nnx.Rngs(0))
        return module, lambda own, x: own(x, Where.whole(*x.shape[:2]))[0]
    return MLPS[kind](WIDTH, HIDDEN, Scales(), nnx.Rngs(0)), lambda own, x: own(x)


def step(kind: str, platform: str, dtype: str = "float32"):
    """A sublayer, from parameters of branch and modulator and the embedding to the stream and a scalar of it."""
    module, call = make(kind)
    graph, state = nnx.split(module)
    gate_graph, gate = nnx.split(NAG.gate(WIDTH, SublayerIndex(1, 2), nnx.Rngs(1)))
    gate = jax.tree.map(lambda x: x + 0.1, gate)  # biases start at 0
    (x,) = draw((BATCH, TOKENS, WIDTH), dtype=np.float32)

    def sublayer(state, gate, x):
        branch = narrowed(functools.partial(call, nnx.merge(graph, state)), dtype, "float32")
        at = Boundary(nnx.merge(gate_graph, gate), None, jnp.int32(1), jnp.int32(2), jnp.float32(1.0), 2)
        stream = NAG.open(x, at, NAG.ends(WIDTH, 1.0, nnx.Rngs(2)))
        result = run(NAG, stream, lambda x: Update(branch(x)), at)
        return jnp.sum(jnp.sin(result.stream.direction)) + jnp.sum(result.stream.log_norm), (result.stream, result.gate)

    def both(state, gate, x):
        with tracing_for(platform):
            return jax.value_and_grad(sublayer, argnums=(0, 1, 2), has_aux=True)(state, gate, x)

    return both, (state, gate, x)


def products(function, arguments) -> int:
    text = jax.jit(function).lower(*arguments).as_text()
    return len(re.findall(r"stablehlo.dot_general", text))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sublayer_is_that_of_a_projection_by_itself(kind, platform, monkeypatch):
    function, arguments = step(kind, platform)
    mine = function(*arguments)
    monkeypatch.setattr(type(NAG), "projection", lambda self, at: None)
    apart = step(kind, platform)[0](*arguments)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(a, b, rtol=ROUNDED, atol=ROUNDED * max(1.0, float(np.max(np.abs(b)))))


@pytest.mark.parametrize("platform", ANSWERS)
@pytest.mark.parametrize("kind", KINDS)
def test_who_answers(kind, platform):
    module, call = make(kind)
    x, weight = draw((BATCH, TOKENS, WIDTH), (WIDTH, GATES), dtype=np.float32)
    with tracing_for(platform), asking(request := Request(x, weight)):
        call(module, x)
    assert (request.product is not None) == (kind in ANSWERS[platform])
    if request.product is not None:
        np.testing.assert_allclose(request.product, x @ weight, rtol=ROUNDED, atol=ROUNDED)


@pytest.mark.parametrize("kind, platform", [(kind, platform) for platform in ANSWERS for kind in ANSWERS[platform]])
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


def test_no_answer_for_other_rows_or_to_a_second_product():
    x, weight = draw((BATCH, TOKENS, WIDTH), (WIDTH, GATES), dtype=np.float32)
    assert asked(x) is None
    with asking(request := Request(x, weight)):
        assert asked(x) is request and asked(x + 0) is None
        request.product = x @ weight
        assert asked(x) is None
        with asking(None):
            assert asked(x) is None
    assert asked(x) is None


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
        with tracing_for(platform), asking(request := Request(x, weight)):
            call(module, x)
        assert request.product is None


def test_of_few_rows_a_gpu_keeps_the_products_apart():
    module, call = make("swiglu")
    x, weight = draw((1, HIDDEN, WIDTH), (WIDTH, GATES), dtype=np.float32)
    with tracing_for("gpu"), asking(request := Request(x, weight)):
        call(module, x)
    assert request.product is None


def test_no_answer_from_inside_a_transformation():
    """An ensemble of MLPs that close over what they read."""
    module, call = make("swiglu")
    graph, state = nnx.split(module)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2.0 * leaf]), state)
    x, weight = draw((BATCH, TOKENS, WIDTH), (WIDTH, GATES), dtype=np.float32)
    for platform in ("cpu", "gpu"):
        with tracing_for(platform), asking(request := Request(x, weight)):
            ensemble = jax.vmap(lambda state: call(nnx.merge(graph, state), x))(several)
            assert request.product is None
            call(module, x)
        assert ensemble.shape == (2, *x.shape) and request.product is not None
