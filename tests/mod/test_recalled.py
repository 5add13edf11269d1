"""NAG's modulator is multiplied with each direction once: for the score, whose product the update takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from nagjax.mod import ModConfig
from nagjax.residual.recalled import recalled
from nagjax.residual.registry import find_scheme
from tests import tiny
from tests.mod.routing_models import make

DIRECTIONS = 5  # as no other size here


def test_a_known_product_is_differentiated_as_if_it_were_made():
    rows, weight, other = (
        jax.random.normal(jax.random.key(i), s) for i, s in enumerate(((2, 3, 8), (8, 5), (2, 3, 5)))
    )
    plain = lambda rows, weight: jnp.sum(jnp.sin(rows @ weight) * other)  # noqa: E731
    known = lambda rows, weight: jnp.sum(jnp.sin(recalled(rows, weight, product)) * other)  # noqa: E731
    product = jax.lax.stop_gradient(rows @ weight)
    for got, want in zip(jax.grad(known, (0, 1))(rows, weight), jax.grad(plain, (0, 1))(rows, weight), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert "dot_general" not in str(jax.make_jaxpr(known)(rows, weight))


def modulators(jaxpr) -> int:
    """Products with a modulator in a program, of a branch the most."""
    count = 0
    for eqn in jaxpr.eqns:
        found = [modulators(inner) for inner in jaxprs_in_params(eqn.params)]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        count += times * (max(found, default=0) if eqn.primitive.name == "cond" else sum(found))
        count += eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.shape[-1:] == (DIRECTIONS,)
    return count


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mod, extra", [({}, 0), ({"unit": "block"}, 2), ({"capacity": "adaptive"}, 0)], ids=str)
def test_one_product_a_sublayer(mod, extra, causal):
    """Of whole blocks the MLP's score is of the direction before attention; its update needs that of the one behind,
    which is in the program twice, for telemetry, before the compiler has seen it."""
    model, batch = make(find_scheme("nag")(directions=DIRECTIONS), ModConfig(rate=(0.5,), **mod)), tiny.packed_batch()
    cuts = jnp.full(2 * model.config.depth, 0.1)
    program = jax.make_jaxpr(lambda: model(batch.tokens, batch.where, cuts=cuts, causal=causal, progress=1.0).hidden)()
    assert modulators(program.jaxpr) == model.config.depth * (2 + extra)
