"""Next-token cross-entropy loss, the batch that it reads, and its sums."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nagjax.layers.where import Where


class Batch(NamedTuple):
    """One batch as the data pipeline yields it; ids, segments and positions are int32, and `weights` is float32, 1
    where the target counts and else 0."""

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    weights: Float[Array, "B T"]

    @property
    def where(self) -> Where:
        return Where(self.segment_ids, self.positions)

    @property
    def counted(self) -> Bool[Array, "B T"]:
        """The tokens whose target counts; `nagjax.measure` takes its means over them. In conversations these are the
        answers. Telemetry and routing instead use all tokens that are not padding (`segment_ids > 0`)."""
        return self.weights > 0


class Sums(NamedTuple):
    """Totals over a batch's counted targets, all float32: nats, squared log-normalisers, targets, and correct greedy
    guesses."""

    nats: Float[Array, ""]
    z: Float[Array, ""]
    count: Float[Array, ""]
    correct: Float[Array, ""]


def cross_entropy(logits: Float[Array, "B T V"], batch: Batch) -> Sums:
    """The sums of a batch, float32, from float32 logits."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    weights = batch.weights.astype(jnp.float32)
    guessed = jnp.argmax(logits, axis=-1) == batch.targets
    return Sums(
        nats=jnp.sum(weights * (log_z - target)),
        z=jnp.sum(weights * log_z**2),
        count=jnp.sum(weights),
        correct=jnp.sum(weights * guessed),
    )
