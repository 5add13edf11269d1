"""Single products of several weights, and activations computed again: as a GPU's program is traced, run on this CPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.layers.config import BlockConfig
from nagjax.layers.linear import linears_then
from nagjax.layers.lora import LowRank, summed
from nagjax.layers.mlp import ACTIVATIONS, MLP
from nagjax.layers.parameters import Scales
from nagjax.layers.platform import joins_matmuls, tracing_for
from nagjax.model.config import ModelConfig
from nagjax.plan.account import account
from nagjax.residual import find_scheme
from nagjax.train.abstract_step import abstract_batch
from nagjax.train.step import jit_train_step
from pallas_kernels.hlo import parse
from tests import tiny
from tests.layers.test_cpu import ROUNDED, branch_and_gradients, draw

ROWS, WIDTH, HIDDEN = 64, 8, 12  # more rows than columns of two weights


def compare(mine, plain):
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=ROUNDED, atol=ROUNDED * np.max(np.abs(b)))


def branch(kind: str, biases: bool = False, rows: int = ROWS):
    """An MLP's graph, parameters and input."""
    mlp = MLP(kind, WIDTH, HIDDEN, Scales(), nnx.Rngs(0), biases)
    graph, state = nnx.split(mlp)
    state = jax.tree.map(lambda x: x + 0.1, state)  # biases start at 0
    return graph, state, draw((1, rows, WIDTH), dtype=np.float32)[0]


def gradients(platform: str, graph, state, x):
    def run(state, x):
        update = nnx.merge(graph, state)(x)
        return jnp.sum(jnp.sin(update)), update

    with tracing_for(platform):
        return jax.grad(run, argnums=(0, 1), has_aux=True)(state, x)


def products(platform: str, graph, state, x) -> list[str]:
    """Shapes of the results of all matrix products, forward and backward."""
    step = jax.jit(functools.partial(gradients, platform, graph))
    text = step.lower(state, x).as_text()
    return re.findall(r"stablehlo.dot_general.*-> tensor<([\dx]+)xf32>", text)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_mlp_is_the_same_on_every_platform(kind, biases):
    mine, other = (gradients(platform, *branch(kind, biases)) for platform in ("cpu", "gpu"))
    compare(other, mine)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_heads": 2},
        {"qk_norm": False},
        {"block": BlockConfig(biases=("qkv",), qk_gain="head")},
        {"block": BlockConfig(qk_gain="row")},
    ],
    ids=["grouped", "no_norm", "biases", "row_gain"],
)
def test_attention_by_one_product_is_that_by_three(options, monkeypatch):
    config = ModelConfig(depth=1, width=8, heads=2, context=16, dtype="float32", attention="xla", **options)
    joined = branch_and_gradients(config, "gpu")
    monkeypatch.setattr("nagjax.layers.linear.joins_matmuls", lambda: False)
    compare(joined, branch_and_gradients(config, "gpu"))


def test_a_gpu_has_one_product_where_others_have_two():
    """Of gate and up: forward, of their cotangent, and for their gradient. The other three are of `down`."""
    small = branch("swiglu", rows=HIDDEN)  # as in decoding: joining the weights would cost more than it saves
    assert len(products("gpu", *branch("swiglu"))) == 3 + 3
    assert len(products("gpu", *small)) == len(products("tpu", *branch("swiglu"))) == 6 + 3
    assert f"1x{ROWS}x{2 * HIDDEN}" in products("gpu", *branch("swiglu"))


@pytest.mark.parametrize("kind, columns", [("swiglu", 2 * HIDDEN), ("gelu", HIDDEN)])
def test_the_gradient_needs_x_the_products_and_what_the_last_map_reads(kind, columns):
    graph, state, x = branch(kind)
    with tracing_for("gpu"):
        _, back = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
    kept = sum(leaf.shape[-1] for leaf in jax.tree.leaves(back) if leaf.shape[:-1] == (1, ROWS))
    assert kept == WIDTH + columns + HIDDEN


def test_an_adapted_weight_stays_by_itself():
    x, weight, other, a, b = draw((1, ROWS, 8), (8, 4), (8, 4), (8, 2), (2, 4), dtype=np.float32)
    with tracing_for("gpu"):
        found = linears_then(lambda *both: both, x, (LowRank(weight, a, b, 0.5), None), (other, None))
    compare(found, (x @ summed(weight, a, b, 0.5), x @ other))


@pytest.mark.parametrize("platform, joins", [("cpu", False), ("tpu", False), ("gpu", True), ("cuda", True)])
def test_the_platform_decides(platform, joins):
    with tracing_for(platform):
        assert joins_matmuls() == joins


MESHES = {"fsdp": (1, 8), "tensor": (2, 2, 2)}


@functools.cache
def collectives(platform: str, mesh: str) -> dict[str, int]:
    """The number of each collective in a training step of two blocks, traced for a platform and compiled for CPUs."""
    config = tiny.run_config(find_scheme("nag")(), depth=2, hidden=24, attention="xla")
    blueprint = tiny.blueprint(config, *MESHES[mesh])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nagjax.train.step.platform_of", lambda mesh: platform)
        compiled = jit_train_step(blueprint).lower(blueprint.abstract(), abstract_batch(blueprint)).compile()
    found = account(parse(compiled.as_text()), blueprint.mesh.size).collectives
    return {kind: one.count for kind, one in found.items()}


def test_columns_split_over_devices_are_not_joined():
    joined, apart = (collectives(platform, "tensor") for platform in ("gpu", "cpu"))
    assert joined.keys() == apart.keys() and all(joined[kind] <= apart[kind] for kind in apart)


def test_joined_weights_are_gathered_at_once():
    """Of each block five fewer in each direction: QKV is one of three, gate and up one of two, and each has the
    modulator's columns."""
    joined, apart = (collectives(platform, "fsdp") for platform in ("gpu", "cpu"))
    assert joined.pop("all-gather") == apart.pop("all-gather") - 2 * 2 * 5
    assert joined == apart
