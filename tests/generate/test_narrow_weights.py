"""Weights in the dtype of computation: the same logits, half of the memory, and nothing done where nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.generate import batching
from nagjax.generate.sample import generate
from nagjax.generate.weights import int8_model, narrow_model
from nagjax.layers.config import BlockConfig, LoRAConfig, MoEConfig
from nagjax.mod import ModConfig
from nagjax.residual import find_scheme
from tests.streams import one_per_stream
from tests.tiny_models import full_logits, make_model

PROMPTS = [[5, 1, 60, 3, 3, 17, 8], [9], [2, 40, 7]]
CASES = {name: (name, {}) for name in one_per_stream()} | {
    "float32 residual": ("plain", {"residual_dtype": "float32"}),
    "tied": ("plain", {"tied": True}),
    "tied, normalised head": ("nag", {"tied": True}),
    "biases, gelu": ("layer_norm", {"mlp": "gelu"}),
    "experts": ("plain", {"moe": MoEConfig(experts=4, active=2, shared=1)}),
    "compressed attention": ("review", {"block": BlockConfig(cca=True)}),
    "Mixture-of-Depths": ("nag", {"mod": ModConfig(rate=(0.5,))}),
    "Mixture-of-Depths, a learned router": ("plain", {"mod": ModConfig(rate=(0.5,), router="linear")}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_same_bits(case):
    name, changes = CASES[case]
    model = make_model(find_scheme(name)(), dtype="bfloat16", **changes)
    narrow = narrow_model(model)
    rows = np.random.default_rng(1).integers(0, 61, (2, 30)).tolist()
    for exact, found in zip(full_logits(model, rows), full_logits(narrow, rows), strict=True):
        np.testing.assert_array_equal(found, exact)
    narrowed = {leaf.get_metadata()["role"] for leaf in variables(narrow) if leaf[...].dtype == jnp.bfloat16}
    assert "matrix" in narrowed and narrowed <= {"matrix", "head"}
    assert narrow_model(narrow) is narrow


def variables(model) -> list[nnx.Variable]:
    return jax.tree.leaves(nnx.state(model, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def test_a_table_that_the_head_normalises_stays():
    def head(scheme):
        return narrow_model(make_model(find_scheme(scheme)(), dtype="bfloat16")).head.tokens[...].dtype

    assert head("plain") == jnp.bfloat16 and head("nag") == jnp.float32


def test_a_model_that_computes_in_float32_is_itself():
    model = make_model(find_scheme("nag")(), dtype="float32")
    assert narrow_model(model) is model
    small = int8_model(model)
    assert narrow_model(small) is small


def test_adapters_are_added_before_a_matrix_is_rounded():
    model = make_model(find_scheme("plain")(), dtype="bfloat16", lora=LoRAConfig(rank=2))
    assert narrow_model(model) is model


def test_the_last_token_is_drawn_and_not_read(monkeypatch):
    """A single token takes no pass but the prompt's; of more, one pass fewer than tokens."""
    model, passes = make_model(find_scheme("nag")()), []
    write = batching.write

    def watched(params, rows, at, done, keys, first, limit, *rest, **own):
        passes.append(int(limit))
        return write(params, rows, at, done, keys, first, limit, *rest, **own)

    monkeypatch.setattr(batching, "write", watched)
    whole = generate(model, PROMPTS, tokens=6, seed=3)
    assert passes == [5]
    assert [row[:1] for row in whole] == generate(model, PROMPTS, tokens=1, seed=3)
    assert passes == [5]
