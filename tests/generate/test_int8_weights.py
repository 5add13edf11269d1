"""Weights in 8 bits: how far each may move, and that models sample with them as without, but for that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.generate.sample import complete, generate
from nagjax.generate.weights import int8_model, with_weights
from nagjax.layers.config import BlockConfig, LoRAConfig, MoEConfig
from nagjax.layers.int8 import Quantized, quantized, widened
from nagjax.layers.platform import tracing_for
from nagjax.layers.ragged import ragged_matmul
from nagjax.mod import ModConfig
from nagjax.residual import find_scheme
from nagjax.runs.opening import open_run
from tests.tiny_models import full_logits, make_model

PROMPTS = [[5, 1, 60, 3, 3, 17, 8], [9], [2, 40, 7]]


def parts(model) -> dict[str, Quantized]:
    leaves = jax.tree_util.tree_leaves_with_path(
        nnx.to_pure_dict(nnx.state(model)), is_leaf=lambda leaf: isinstance(leaf, Quantized)
    )
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@pytest.mark.parametrize(("shape", "over"), [((3, 40, 24), -2), ((24, 40), -1)])
def test_no_weight_moves_by_more_than_half_a_step_of_its_channel(shape, over):
    weight = (
        np.random.default_rng(0).standard_normal(shape, np.float32)
        * np.logspace(-3, 3, 24, dtype=np.float32)[(...,) if over == -2 else (slice(None), None)]
    )
    found = quantized(jnp.asarray(weight), over)
    step = np.abs(weight.astype(np.float64)).max(over, keepdims=True) / 127
    np.testing.assert_allclose(found.scale, step, rtol=1e-6)
    assert found.values.dtype == jnp.int8
    assert np.abs(np.asarray(found.values, np.int32)).max(over).min() == 127  # every channel uses its whole range
    moved = np.abs(np.asarray(widened(found), np.float64) - weight)
    assert np.all(moved <= step * (0.5 + 1e-4))  # float32's rounding of 127 steps besides
    assert moved.max() > 0.4 * step.min()


def test_integers_and_channels_of_zeros_stay_exact():
    weight = jnp.array([[127.0, 0.0, -3.0], [-40.0, 0.0, 127.0]])
    np.testing.assert_array_equal(widened(quantized(weight)), weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_that_with_the_widened_matrix(dtype):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((2, 3, 40)), dtype)
    weight = quantized(jnp.asarray(random.standard_normal((40, 24), np.float32)))
    want = np.asarray(x, np.float64) @ np.asarray(widened(weight), np.float64)
    found = x @ weight
    assert found.dtype == x.dtype and found.shape == (2, 3, 24)
    unit = float(jnp.finfo(x.dtype).eps)
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(widened(weight), np.float64))
    assert np.all(np.abs(np.asarray(found, np.float64) - want) <= unit * np.abs(want) + 42 * 2**-24 * size)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_ragged_matmul_is_that_with_the_widened_matrices(platform):
    random = np.random.default_rng(0)
    rows = jnp.asarray(random.standard_normal((20, 8), np.float32)).at[17:].set(jnp.nan)  # these are of no group
    matrices = quantized(jnp.asarray(random.standard_normal((4, 8, 6), np.float32)))
    sizes = jnp.array([5, 0, 9, 3])
    with tracing_for(platform):
        found = ragged_matmul(rows, matrices, sizes)
    want = ragged_matmul(rows, widened(matrices), sizes)
    np.testing.assert_allclose(found, want, atol=1e-5)
    assert not np.any(found[17:])


def widened_model(model):
    """The same model with float32 matrices of the integers' values."""
    graph, params = nnx.split(model)
    is_leaf = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    return nnx.merge(graph, jax.tree.map(lambda v: v.replace(widened(v[...])), params, is_leaf=is_leaf))


@pytest.mark.parametrize(
    "changes", [{}, {"mlp": "gelu", "tied": True}, {"moe": MoEConfig(experts=4, active=2, shared=1)}]
)
def test_logits_are_those_of_the_widened_matrices(changes):
    """So that all of the difference to the full weights is the quantisation's."""
    small = int8_model(make_model(find_scheme("plain")(), **changes))
    rows = np.random.default_rng(1).integers(0, 61, (2, 30)).tolist()
    for exact, found in zip(full_logits(widened_model(small), rows), full_logits(small, rows), strict=True):
        np.testing.assert_allclose(found, exact, atol=2e-4 * np.std(exact))


def test_an_evaluation_of_experts_by_capacity_takes_8_bit_weights():
    """A pass that judges: where text is written no choice is dropped."""
    experts = MoEConfig(experts=4, active=2, dispatch="capacity")
    small = int8_model(make_model(find_scheme("plain")(), moe=experts))
    tokens = np.random.default_rng(1).integers(0, 61, (2, 30))
    found, exact = (
        jax.jit(lambda p, graph=graph: (lambda m: m.logits(m(tokens)))(nnx.merge(graph, p)))(params)
        for graph, params in map(nnx.split, (small, widened_model(small)))
    )
    np.testing.assert_allclose(found, exact, atol=2e-4 * np.std(exact))


@pytest.mark.parametrize("name", ["plain", "nag", "hyper_connections"])  # by what they make of the head's table
def test_a_scheme_s_logits_stay_close_and_its_sampling_is_that_of_its_full_pass(name):
    """Close: an error of half a step in every weight is one of at most 1/254 of a channel's largest weight; through two
    blocks the logits move by a few percent of their spread."""
    model = make_model(find_scheme(name)())
    small = int8_model(int8_model(model))  # the second time changes nothing
    rows = np.random.default_rng(1).integers(0, 61, (len(PROMPTS), 30)).tolist()  # for one program with those below
    for exact, found in zip(full_logits(model, rows), full_logits(small, rows), strict=True):
        spread = np.std(exact)
        assert 0 < np.sqrt(np.mean((found - exact) ** 2)) < 0.05 * spread
    new = generate(small, PROMPTS, tokens=6, temperature=0.0)
    lines = full_logits(small, [prompt + more for prompt, more in zip(PROMPTS, new, strict=True)])
    for prompt, more, line in zip(PROMPTS, new, lines, strict=True):
        assert np.argmax(line, -1)[len(prompt) - 1 : -1].tolist() == more


CASES = {
    "experts": ("plain", {"moe": MoEConfig(experts=4, active=2, shared=1)}),
    "tied": ("plain", {"tied": True}),
    "tied, normalised head": ("nag", {"tied": True}),
    "biases, gelu": ("layer_norm", {"mlp": "gelu"}),
    "bfloat16": ("nag", {"dtype": "bfloat16"}),
    "compressed attention": ("review", {"block": BlockConfig(cca=True)}),
    "Mixture-of-Depths": ("nag", {"mod": ModConfig(rate=(0.5,))}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_model_samples(case):
    name, changes = CASES[case]
    model = make_model(find_scheme(name)(), **changes)
    small = int8_model(model)
    held = {path for path, leaf in parts(small).items() if isinstance(leaf, Quantized)}
    assert {"blocks/attention/branch/query", "blocks/mlp/branch/up", "blocks/mlp/branch/down"} <= held
    assert not any(part in path for path in held for part in ("router", "/gate/", "/mix"))
    assert ("head/tokens" in held) == (not model.config.tied)
    assert ("embedding/tokens" in held) == (case == "tied")
    routed = {"cuts": jnp.full(model.config.sublayers, -10.0)} if model.config.mod.active else {}
    new = generate(small, PROMPTS, tokens=6, temperature=0.0, **routed)
    if not routed and case != "bfloat16":
        lines = full_logits(small, [prompt + more for prompt, more in zip(PROMPTS, new, strict=True)])
        for prompt, more, line in zip(PROMPTS, new, lines, strict=True):
            assert np.argmax(line, -1)[len(prompt) - 1 : -1].tolist() == more
    assert [len(row) for row in new] == [6, 6, 6]


def test_a_run_samples_with_int8_weights_in_a_quarter_of_the_memory(run_folder):
    run = open_run(run_folder)
    small = with_weights(run, "int8")
    assert with_weights(run, "full") is run
    count = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))  # noqa: E731
    matrices = {path for path, leaf in parts(small.model).items() if isinstance(leaf, Quantized)}
    before = sum(leaf.nbytes for path, leaf in parts(run.model).items() if path in matrices)
    after = sum(count(leaf) for path, leaf in parts(small.model).items() if path in matrices)
    scales = sum(leaf.scale.nbytes for path, leaf in parts(small.model).items() if path in matrices)
    assert after - scales == before / 4 and count(small.params) == count(run.params) - before + after
    texts = complete(small, ["def ", "x"], tokens=8, temperature=0.0)
    assert len(texts) == 2
    text = "import os\n"
    exact, found = run.logits(text), small.logits(text)
    assert 0 < float(jnp.max(jnp.abs(exact - found))) < 0.1 * float(jnp.std(exact))


def test_adapters_and_several_devices_are_refused():
    model = make_model(find_scheme("plain")(), lora=LoRAConfig(rank=2))
    with pytest.raises(UserError, match="merge"):
        int8_model(model)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]) if len(jax.devices()) > 1 else None
    if mesh is None:
        pytest.skip("one device")
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    graph, params = nnx.split(make_model(find_scheme("plain")()))
    with pytest.raises(UserError, match="one device"):
        int8_model(nnx.merge(graph, jax.device_put(params, spread)))
