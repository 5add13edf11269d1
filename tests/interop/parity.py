"""What two programs' logits may differ by, and how nagjax computes them."""

import jax
import jax.numpy as jnp
import numpy as np

from nagjax.generate.load import OpenRun
from nagjax.layers.where import Where

TOLERANCE = 2e-4  # float32, greatest absolute difference


def logits_of(run: OpenRun, tokens: np.ndarray) -> np.ndarray:
    tokens = jnp.asarray(tokens, jnp.int32)

    @jax.jit
    def forward(params):
        model = run.blueprint.model(params)
        return model.logits(model(tokens, Where.whole(*tokens.shape), progress=run.progress))

    return np.asarray(forward(run.params))
