"""Evidence of the curse of depth: the variance of the residual, and the loss that removing each block adds."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from nagjax.measure.cuts import Cutter
from nagjax.measure.interventions import residual, through
from nagjax.measure.norms import variance
from nagjax.runs.opening import OpenRun, open_run
from nagjax.train.evaluator import Evaluator
from nagjax.train.loss import Batch


def use_of_depth(folder: Path) -> dict:
    """The variance of the residual in front of every block and after the last, and the added loss without each
    block."""
    run = open_run(folder)
    seen = list(Evaluator(run.blueprint).batches(max(run.config.train.eval_batches // 8, 1)))
    return {
        "variance": [round(float(v), 5) for v in variances(run, seen)],
        "damage": [round(float(d), 5) for d in Cutter(run).drops(seen)],
    }


def variances(run: OpenRun, batches: Sequence[Batch]) -> Float[np.ndarray, "L+1"]:
    """The variance [L+1] of the residual, mean over the counted tokens."""
    graph, params = nnx.split(run.model)

    def intervene(model, stream, call):
        after = through(model, stream, call)
        return after, tuple(variance(residual(model.scheme, one)) for one in (stream, after))

    @jax.jit
    def look(params, batch: Batch) -> Float[Array, "L+1"]:
        before, after = nnx.merge(graph, params)(batch.tokens, batch.where, intervene=intervene).seen
        values = jnp.concatenate([before, after[-1:]])
        return jnp.sum(values * batch.weights, axis=(1, 2)) / jnp.sum(batch.weights)

    return np.mean([np.asarray(look(params, batch)) for batch in batches], axis=0)
