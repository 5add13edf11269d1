"""The linear router's factor on an update: fair at the start, and what runs of earlier versions were trained with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.mod import ModConfig
from nagjax.mod.routers import find_router
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig, from_dict, to_dict
from tests import tiny

SCORES = jax.random.normal(jax.random.key(0), (64, 256))  # as at the start: of unit variance


def factors(weight: str, scores=SCORES):
    router = find_router("linear", find_scheme("plain")(), weight)
    return np.asarray(router.weigh(jnp.ones((*scores.shape, 1)), scores)[..., 0])


@pytest.mark.parametrize("rate", [0.125, 0.25, 0.5])
def test_no_update_changes_its_sign(rate):
    """For tokens that run. The raw score, still an option, changed the sign for two in five when an eighth skipped."""
    keep = int((1 - rate) * SCORES.shape[1])
    chosen = jax.lax.top_k(SCORES, keep)[0]
    for weight in ("tanh", "sigmoid"):
        assert factors(weight, chosen).min() > 0
    assert np.mean(factors("score", chosen) < 0) == pytest.approx((0.5 - rate) / (1 - rate), abs=0.03)


def test_factors_at_the_start():
    """1 + tanh leaves an update unchanged on average; the sigmoid halves it."""
    assert ModConfig().weight == "sigmoid"
    assert factors("tanh").mean() == pytest.approx(1.0, abs=0.01)
    assert factors("sigmoid").mean() == pytest.approx(0.5, abs=0.01)
    np.testing.assert_array_equal(factors("score"), SCORES)


@pytest.mark.parametrize("weight", ["tanh", "sigmoid", "score"])
def test_the_router_learns_by_its_factor(weight):
    router = find_router("linear", find_scheme("plain")(), weight)
    slopes = jax.grad(lambda scores: jnp.sum(router.weigh(jnp.ones((4, 8, 3)), scores)))(jnp.zeros((4, 8)))
    np.testing.assert_allclose(slopes, 3 * {"tanh": 1.0, "sigmoid": 0.25, "score": 1.0}[weight])


def test_an_earlier_run_has_the_factor_it_was_trained_with():
    """Only runs that had a factor keep theirs: others continue under today's options."""

    def opened(scheme, **mod):
        values = to_dict(tiny.run_config(find_scheme(scheme)(), mod=ModConfig(**mod)))
        del values["model"]["mod"]["weight"]
        return from_dict(RunConfig, values).model.mod

    assert opened("plain", rate=(0.5,)).weight == "score"
    assert opened("lns", attention_rate=(1.0,), router="linear").weight == "score"
    for scheme, mod in (("plain", {}), ("nag", {"rate": (0.5,)}), ("plain", {"rate": (0.5,), "router": "random"})):
        assert opened(scheme, **mod) == ModConfig(**mod)
