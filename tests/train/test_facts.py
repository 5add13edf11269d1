"""Counts against the real arrays and programs: parameters, bytes, and XLA's count of the forward pass' FLOPs."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nagjax.layers.attention import Where
from nagjax.mod.routed import ForwardContext
from nagjax.plan.chips import CHIPS
from nagjax.residual import Boundary, find_scheme
from nagjax.runs.facts import model_costs, parameters_by_part, peak_flops, run_facts
from nagjax.train.facts import state_bytes
from pallas_kernels.origin import versions
from tests import tiny

BATCH, TOKENS = 2, 64
SHAPE = dict(width=512, heads=8, kv_heads=2, context=TOKENS, vocab=1000)


def xla_flops_per_token(bp) -> float:
    """XLA's count of the unrolled forward pass (a scan's body would be counted once), elementwise work included."""
    depth = bp.config.model.depth

    def run(params, tokens):
        model, where = bp.model(params), Where.whole(BATCH, TOKENS)
        ctx = ForwardContext(where, jnp.float32(1.0), jnp.uint32(0), causal=False)
        graph, layers = nnx.split(model.layers())
        first = jax.tree.map(lambda x: x[0], model.blocks.attention.entry)
        at = Boundary(None, first, jnp.int32(0), jnp.int32(1), jnp.float32(1.0), model.config.sublayers_before)
        stream = model.scheme.open(model.embedding(tokens, where, jnp.float32), at, model.ends)
        for i in range(depth):
            layer = nnx.merge(graph, jax.tree.map(lambda x, i=i: x[i], layers))
            stream, _, _ = model.step(stream, layer, ctx)
        hidden, log_scale = model.scheme.close(stream, model.ends)
        return jnp.exp(log_scale)[..., None] * (hidden @ model.head_rows().T)

    lowered = jax.jit(run).lower(bp.abstract().params, jnp.zeros((BATCH, TOKENS), jnp.int32))
    return lowered.cost_analysis()["flops"] / (BATCH * TOKENS)


@pytest.mark.parametrize("scheme", ["plain", "nag", "review"])
def test_forward_flops_are_those_xla_counts(scheme):
    """Per block (depth 2 less depth 1), and all the rest. XLA computes the masked half of attention too."""
    counted, known = [], []
    for depth in (1, 2):
        bp = tiny.blueprint(tiny.run_config(find_scheme(scheme)(), depth=depth, **SHAPE))
        masked = depth * 4 * 512 * (TOKENS - (TOKENS + 1) / 2)
        counted.append(xla_flops_per_token(bp))
        known.append(model_costs(bp).forward + masked)
        assert model_costs(bp).train == 3 * model_costs(bp).forward
    block = counted[1] - counted[0]
    assert block == pytest.approx(known[1] - known[0], rel=0.02)
    assert counted[0] == pytest.approx(known[0], rel=0.02)


def test_parameters_and_bytes():
    for scheme in ("plain", "nag", "review"):
        bp = tiny.blueprint(tiny.run_config(find_scheme(scheme)(), positions="learned"))
        parts, size = parameters_by_part(bp), sum(math.prod(p.shape) for p in jax.tree.leaves(tiny_params(bp)))
        assert sum(parts.values()) == size
        assert parts["attention"] == 3 * (16 * 16 + 2 * 16 * 8 + 16 * 16)
        assert parts["mlp"] == 3 * 3 * 16 * bp.config.model.hidden
        assert parts["embedding"] == (32 + 8) * 16 and parts["head"] == 32 * 16
        assert (
            parts["residual"]
            == {
                "plain": (2 * 3 + 1) * 16,
                "review": (2 * 3 + 1) * 16 + 6 * (2 * 16 * 16 + 16),
                "nag": 6 * (16 * 32 + 32 + 32 + 2) + 2,
            }[scheme]
        )
        memory = state_bytes(bp)
        assert memory["parameters"] == 4 * size
        assert 2 * memory["parameters"] <= memory["optimizer"] <= 2 * memory["parameters"] + 64
    assert model_costs(bp).kv_bytes == 2 * 3 * 1 * 8 * 4


def tiny_params(bp):
    return jax.eval_shape(lambda: bp.init(0)).params


def test_peaks_are_looked_up_and_never_guessed():
    assert peak_flops("NVIDIA H200") == 989e12 and peak_flops("TPU v5 lite") == 197e12 and peak_flops("cpu") is None
    facts = run_facts(tiny.blueprint(tiny.run_config(find_scheme("nag")())))
    assert facts["devices"] == 1 and facts["versions"]["jax"] == jax.__version__


PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v4 lite": 138e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v5e": 197e12,
    "TPU v5 lite": 197e12,
    "TPU v6e": 918e12,
    "TPU v6 lite": 918e12,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GeForce RTX 4090": None,
    "TPU7x": None,
}


@pytest.mark.parametrize("name", PEAKS)
def test_a_peak_is_that_of_the_device_and_not_of_one_whose_name_begins_alike(name):
    assert peak_flops(name) == PEAKS[name]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_peaks_are_those_that_plans_are_made_with(chip):
    assert peak_flops(chip.title) == pytest.approx(chip.flops, rel=1e-3)


def test_a_package_that_is_not_installed_has_no_version():
    found = versions(("jax", "no-such-package"))
    assert found["jax"] == jax.__version__ and found["no-such-package"] is None
