"""Calibration: whether a model's confidence in its predictions matches its accuracy (Guo et al. 2017,
arXiv:1706.04599)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nagjax.errors import UserError
from nagjax.model.transformer import Transformer
from nagjax.train.head_loss import by_token
from nagjax.train.loss import Batch

BINS = 15  # of equal width, the usual number


def confidence(
    logits: Float[Array, "*N V"], targets: Int[Array, "*N"]
) -> tuple[Float[Array, "*N"], Float[Array, "*N"]]:
    """For each token the probability of the likeliest entry, and 1 if that entry is the target, else 0. Both
    float32."""
    wide = logits.astype(jnp.float32)
    sure = jnp.exp(jnp.max(wide, axis=-1) - jax.nn.logsumexp(wide, axis=-1))
    return sure, (jnp.argmax(wide, axis=-1) == targets).astype(jnp.float32)


def reliability(
    sure: Float[Array, "*N"], right: Float[Array, "*N"], weights: Float[Array, "*N"], bins: int = BINS
) -> Float[Array, "bins 3"]:
    """Sums of weights, of confidences and of correct predictions, both times the weights, over the tokens whose
    confidence lies in each of `bins` equal parts of (0, 1], upper ends included. Results of several batches may be
    added."""
    part = jnp.clip(jnp.ceil(sure * bins).astype(jnp.int32) - 1, 0, bins - 1)
    found = weights[..., None] * jnp.stack([jnp.ones_like(sure), sure, right], axis=-1)
    return jnp.zeros((bins, 3)).at[part.reshape(-1)].add(found.reshape(-1, 3))


def expected_calibration_error(found: Float[Array, "bins 3"]) -> Float[Array, ""]:
    """`sum_b n_b / N |accuracy_b - confidence_b|`, from the sums of `reliability`; 0 for a model whose accuracy equals
    its confidence in every bin."""
    total = jnp.sum(found[:, 0])
    return jnp.sum(jnp.abs(found[:, 2] - found[:, 1])) / jnp.where(total > 0, total, 1.0)


def reliability_on(
    model: Transformer, batches: Sequence[Batch], scales: Sequence[float] | None = None, **options
) -> Float[Array, "bins 3"]:
    """`reliability` of the model's predictions for the counted targets of all batches. scales: weight of a target of
    each batch; by default 1. `options` go into the model's call. Raises UserError without batches."""
    if not batches:
        raise UserError("batches", batches, "give at least one")
    graph, params = nnx.split(model)

    @jax.jit
    def of(params, batch: Batch):
        own = nnx.merge(graph, params)
        output = own(batch.tokens, batch.where, **options)
        sure, right = by_token(confidence, own, output, batch.targets)
        return reliability(sure, right, (batch.weights > 0).astype(jnp.float32))

    scales = [1.0] * len(batches) if scales is None else scales
    return sum(scale * of(params, batch) for scale, batch in zip(scales, batches, strict=True))
