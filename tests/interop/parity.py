"""How much the logits of two programs may differ, and how nagjax computes them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from nagjax.layers.where import Where
from nagjax.runs.opening import OpenRun

TOLERANCE = 2e-4  # float32, greatest absolute difference


@functools.cache
def _forward(run: OpenRun):
    def forward(params, tokens):
        model = run.blueprint.model(params)
        return model.logits(model(tokens, Where.whole(*tokens.shape), progress=run.progress))

    return jax.jit(forward)


def logits_of(run: OpenRun, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(_forward(run)(run.params, jnp.asarray(tokens, jnp.int32)))
