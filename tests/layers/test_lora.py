"""Adapters: their product, what they are merged into, and which matrices have them."""

import jax
import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.layers.config import LoRAConfig, MoEConfig
from nagjax.layers.lora import LowRank, merged, summed
from nagjax.mod import ModConfig, adaptive
from nagjax.residual import find_scheme
from nagjax.runs.weights import without_adapters
from tests import tiny
from tests.tolerance import assert_close

NOISE = np.random.default_rng(0)
RANK2 = LoRAConfig(rank=2, alpha=6.0)


def blueprint(scheme="nag", lora=RANK2, mesh=(1,), **model):
    return tiny.blueprint(tiny.run_config(find_scheme(scheme)(), lora=lora, **model), *mesh)


def test_apart_and_summed_are_one_matrix_in_value_and_gradient():
    x, weight, a, b = (jax.numpy.asarray(NOISE.standard_normal(s)) for s in ((2, 3, 6), (6, 5), (6, 2), (2, 5)))
    apart = lambda x, a, b: ((x @ LowRank(weight, a, b, 3.0)) ** 2).sum()  # noqa: E731
    whole = lambda x, a, b: ((x @ summed(weight, a, b, 3.0)) ** 2).sum()  # noqa: E731
    want, got = (jax.value_and_grad(f, argnums=(0, 1, 2))(x, a, b) for f in (whole, apart))
    assert_close(got, want, terms=100, chain=4)


def test_gradients_reach_adapters_through_a_branch_that_is_an_operand():
    """Of adaptive depth, whose branches of a switch take sublayers as operands."""
    x, weight, a, b = (jax.numpy.asarray(NOISE.standard_normal(s)) for s in ((2, 3), (3, 4), (3, 1), (1, 4)))
    own = lambda a, b: LowRank(weight, a, b, 3.0)  # noqa: E731
    chosen = lambda a, b: adaptive.switch(jax.numpy.int32(0), [lambda own: x @ own], own(a, b)).sum()  # noqa: E731
    want = jax.grad(lambda a, b: (x @ own(a, b)).sum(), argnums=(0, 1))(a, b)
    assert_close(jax.grad(chosen, argnums=(0, 1))(a, b), want, terms=12, chain=4)


MODELS = {
    "dense": ({}, (1,)),
    "routed": ({"mod": ModConfig(rate=(0.5,))}, (2, 2, 2)),
    "experts": ({"moe": MoEConfig(experts=4, active=2, shared=1)}, (2, 2, 2)),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_merged_model_is_the_adapted_one(model):
    changes, mesh = MODELS[model]
    bp = blueprint(mesh=mesh, depth=1, **changes)
    random = lambda p: 0.3 * NOISE.standard_normal(p.shape).astype(np.float32)  # noqa: E731
    params = jax.device_put(jax.tree.map(random, bp.parameters), bp.parameter_shardings())
    plain = tiny.blueprint(without_adapters(bp.config), *mesh)
    alone = merged(params, bp.config.model.lora)
    assert jax.tree.structure(alone) == jax.tree.structure(plain.parameters)
    tokens = tiny.packed_batch().tokens
    run = lambda bp: jax.jit(lambda p: (m := bp.model(p)).logits(m(tokens)))  # noqa: E731
    with jax.set_mesh(bp.mesh):
        got, want = run(bp)(params), run(plain)(alone)
    assert_close(got, want, **tiny.FORWARD)
    query = params["blocks"]["attention"]["branch"]["query"]
    assert float(np.abs(alone["blocks"]["attention"]["branch"]["query"] - query).max()) > 0.1


@pytest.mark.parametrize(
    "targets, names",
    [
        (("attention",), {"attention": {"query", "key", "value", "out"}}),
        (("query", "value"), {"attention": {"query", "value"}}),
        (("mlp", "query"), {"attention": {"query"}, "mlp": {"gate", "up", "down"}}),
        (("down",), {"mlp": {"down"}}),
    ],
)
def test_targets(targets, names):
    bp = blueprint(lora=LoRAConfig(rank=1, targets=targets))
    found = {kind: set(own["lora"]) for kind, own in bp.parameters["blocks"].items() if "lora" in own}
    assert found == names
    assert all(p.trained == (p.role == "adapter") for p in jax.tree.leaves(bp.parameters))


def test_a_target_that_is_not_there():
    with pytest.raises(UserError, match="lora.targets = 'gate'.*mlp has up, down"):
        blueprint(lora=LoRAConfig(rank=1, targets=("gate",)), mlp="gelu")
    with pytest.raises(UserError, match="lora.targets"):
        LoRAConfig(rank=1, targets=())


@pytest.mark.parametrize("scheme", ["plain", "ngpt"])
def test_start_values_are_those_without_adapters(scheme):
    """The matrices are drawn as without adapters, and the adapters' products are 0 at the start."""
    bp = blueprint(scheme)
    plain = tiny.blueprint(without_adapters(bp.config))
    params, want = (tiny.fresh(one).params for one in (bp, plain))
    for got, value in zip(*map(jax.tree.leaves, (merged(params, RANK2), want)), strict=True):
        np.testing.assert_array_equal(got, value)
