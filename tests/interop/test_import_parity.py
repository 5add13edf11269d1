"""Logits of imported models against transformers' own, family by family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_cases import CASES

import nagjax
from nagjax.layers.where import Where

TOLERANCE = 2e-4


def logits_of(run, tokens: np.ndarray) -> np.ndarray:
    tokens = jnp.asarray(tokens, jnp.int32)

    @jax.jit
    def forward(params):
        model = run.blueprint.model(params)
        return model.logits(model(tokens, Where.whole(*tokens.shape)))

    return np.asarray(forward(run.params))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(reference, case):
    run = nagjax.load(reference.folder / case)
    want = reference.logits(case)
    difference = np.abs(logits_of(run, reference.tokens(case)) - want).max()
    assert difference < TOLERANCE
    assert want.std() > 0.1
