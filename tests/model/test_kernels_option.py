"""The `kernels` option reaches the residual updates, and changes nothing else."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nagjax.layers.attention import Where
from nagjax.model.config import ModelConfig
from nagjax.model.transformer import Transformer
from nagjax.residual import find_scheme
from pallas_kernels import using
from tests import tiny
from tests.tolerance import assert_close


def jaxpr_and_hidden(scheme, kernels):
    config = ModelConfig(depth=2, width=16, vocab=11, context=8, dtype="float32", kernels=kernels)
    model = Transformer(config, find_scheme(scheme)(), nnx.Rngs(0))
    graph, params = nnx.split(model)

    def run(params):
        return nnx.merge(graph, params)(jnp.arange(8)[None] % 11, Where.whole(1, 8)).hidden

    return str(jax.make_jaxpr(run)(params)), jax.jit(run)(params)


def test_auto_is_what_the_surrounding_program_chooses():
    chosen, _ = jaxpr_and_hidden("nag", "reference")
    with using("reference"):
        assert jaxpr_and_hidden("nag", "auto")[0].count("custom_vjp_call") == chosen.count("custom_vjp_call")
        assert jaxpr_and_hidden("nag", "xla")[0].count("custom_vjp_call") > chosen.count("custom_vjp_call")


@pytest.mark.parametrize("scheme", ["plain", "review", "nag"])
def test_reference_and_xla_are_different_programs_with_the_same_values(scheme):
    reference, expected = jaxpr_and_hidden(scheme, "reference")
    fused, hidden = jaxpr_and_hidden(scheme, "xla")
    assert fused.count("custom_vjp_call") > reference.count("custom_vjp_call")  # branches have their own on a CPU
    assert_close(hidden, expected, **tiny.FORWARD)
