"""Gates held at their means, to measure what their dependence on the token is worth.

A gate module supports this by a method `held_at(mean)`: the values of its own parameters, by name, with which the gate
is `mean` for every token. NAG's modulator, Review's gates and Highway's have it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nagjax.errors import UserError
from nagjax.model.transformer import BlockCall, Transformer
from nagjax.train.head_loss import head_loss
from nagjax.train.loss import Batch


def holds(model: Transformer) -> bool:
    """Whether the model's gates can be held: its scheme's gates have `held_at`, and no routing reads them."""
    return hasattr(model.blocks.attention.gate, "held_at") and not model.config.mod.active


def _check(model: Transformer) -> None:
    if not holds(model):
        fix = "its gates cannot be held: its scheme has no held_at, or tokens skip by them"
        raise UserError("model", model.scheme.name, fix)


def gate_means(model: Transformer, batches: Sequence[Batch], *, progress: float = 1.0) -> Float[Array, "S G"]:
    """Mean gate of each sublayer, over the counted tokens of all batches that ran it; 0 if none ran it. Float32. G is
    the width, or 1 for NAG's modulator.

    Raises UserError if no token counts, and for gates that cannot be held.
    """
    _check(model)
    graph, params = nnx.split(model)

    @jax.jit
    def sums(params, batch: Batch):
        def intervene(model: Transformer, stream, call: BlockCall):
            both = model.sublayers(stream, *call)
            counted = [(batch.counted & own.ran).astype(jnp.float32) for own in both]
            found = [
                jnp.einsum("btg,bt->g", own.gate.astype(jnp.float32), weights, precision="highest")
                for own, weights in zip(both, counted, strict=True)
            ]
            return both[1].stream, (jnp.stack(found), jnp.stack([jnp.sum(weights) for weights in counted]))

        output = nnx.merge(graph, params)(batch.tokens, batch.where, intervene=intervene, progress=progress)
        gates, counts = output.seen
        return gates.reshape(-1, gates.shape[-1]), counts.reshape(-1, 1)

    found = [sums(params, batch) for batch in batches]
    counts = sum(count for _, count in found)
    if not jnp.any(counts):
        raise UserError("batches", len(batches), "no token of this text counts, to take gates' means of: give more")
    return sum(own for own, _ in found) / jnp.maximum(counts, 1.0)


def held(model: Transformer, means: Float[Array, "S G"]) -> Transformer:
    """A copy of the model whose gates are `means` for every token. Raises UserError for gates that cannot be held."""
    _check(model)
    model = nnx.clone(model)
    for own, mean in ((model.blocks.attention.gate, means[::2]), (model.blocks.mlp.gate, means[1::2])):
        for name, value in own.held_at(mean).items():
            parameter = getattr(own, name)
            parameter[...] = value.astype(parameter[...].dtype)
    return model


def held_losses(
    model: Transformer, training: Sequence[Batch], held_out: Sequence[Batch], *, progress: float = 1.0
) -> dict[str, list[float]]:
    """Nats per token of each held-out batch, NaN if none of its tokens counts: `whole`, of the model itself; `mean`,
    with each gate at its mean over the training batches; and, if gates have a value per channel, `one_mean`, with all
    channels of a gate at one mean. Raises UserError as `gate_means` does."""
    means = gate_means(model, training, progress=progress)
    models = {"whole": model, "mean": held(model, means)}
    if means.shape[1] > 1:
        models["one_mean"] = held(model, jnp.broadcast_to(jnp.mean(means, axis=1, keepdims=True), means.shape))
    graph, _ = nnx.split(model)

    @jax.jit
    def loss(params, batch: Batch):
        own = nnx.merge(graph, params)
        _, sums = head_loss(own, own(batch.tokens, batch.where, progress=progress), batch)
        return jnp.where(sums.count > 0, sums.nats / jnp.maximum(sums.count, 1.0), jnp.nan)

    params = {name: nnx.state(own) for name, own in models.items()}
    return {name: [float(loss(own, batch)) for batch in held_out] for name, own in params.items()}
