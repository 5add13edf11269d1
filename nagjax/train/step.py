"""One training step and one evaluation step, jitted on the run's mesh."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from nagjax.train.loss import Batch, Sums, forward
from nagjax.train.mesh import BATCH, batch_sharding, pin_rows, replicated
from nagjax.train.optimizer import schedule
from nagjax.train.state import Blueprint, TrainState
from pallas_kernels.placement import shard_rows


class StepMetrics(NamedTuple):
    """Scalars of one step; loss in nats per counted target."""

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]
    grad_norm: Float[Array, ""]
    lr: Float[Array, ""]
    count: Float[Array, ""]


class EvalSums(NamedTuple):
    """Totals of one evaluation batch: `bytes` are those the counted targets decode to; `depth` is telemetry [S]."""

    sums: Sums
    bytes: Float[Array, ""]
    depth: dict[str, Float[Array, " S"]]


def progress(blueprint: Blueprint, step: Int[Array, ""]) -> Float[Array, ""]:
    """Share of the training done."""
    return step.astype(jnp.float32) / blueprint.config.train.steps


def train_step(blueprint: Blueprint) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The update as a pure function: gradient of the batch's mean loss (plus z-loss), optimizer, new state.

    With accumulation the batch is worked through in parts; the gradient is that of the whole batch's mean.
    """
    train, mesh = blueprint.config.train, blueprint.mesh
    rate = schedule(blueprint.config.optimizer, blueprint.config.learning_rate, train.steps)

    def summed_loss(params, part: Batch, done):
        sums, _ = forward(blueprint.model(params), part, progress=done, pin=pin_rows(mesh))
        return sums.nats + train.z_loss * sums.z, sums

    def step(state: TrainState, batch: Batch):
        done = progress(blueprint, state.step)
        gradient = jax.grad(summed_loss, has_aux=True)
        if train.accumulate == 1:
            grads, sums = gradient(state.params, batch, done)
        else:
            parts = jax.tree.map(lambda x: _parts(x, train.accumulate), batch)
            zeros = jax.eval_shape(lambda: gradient(state.params, jax.tree.map(lambda x: x[0], parts), done))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)
            add = lambda total, part: (jax.tree.map(jnp.add, total, gradient(state.params, part, done)), None)  # noqa: E731
            (grads, sums), _ = jax.lax.scan(add, zeros, parts)
        count = jnp.maximum(sums.count, 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, optimizer = blueprint.optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(
            sums.nats / count,
            sums.correct / count,
            optax.tree.norm(grads),
            jnp.float32(rate(state.step)),
            sums.count,
        )
        return TrainState(state.step + 1, params, optimizer, state.rng), metrics

    return shard_rows(step, mesh, P(BATCH)) if mesh.size > 1 else step


def _parts(x: Array, n: int) -> Array:
    """[B, ...] to [n, B/n, ...], every part spread over the same devices as the whole."""
    return x.reshape(x.shape[0] // n, n, *x.shape[1:]).swapaxes(0, 1)


def jit_train_step(blueprint: Blueprint):
    """The step compiled for the mesh; the old state's memory is reused for the new one."""
    shardings = blueprint.shardings()
    return jax.jit(
        train_step(blueprint),
        in_shardings=(shardings, batch_sharding(blueprint.mesh)),
        out_shardings=(shardings, replicated(blueprint.mesh)),
        donate_argnums=0,
    )


def jit_eval_step(blueprint: Blueprint):
    """`(params, steps done, batch, token_bytes [V]) -> EvalSums`."""
    mesh = blueprint.mesh

    def step(params: Any, done: Int[Array, ""], batch: Batch, token_bytes: Float[Array, " V"]) -> EvalSums:
        model = blueprint.model(params)
        options = {"progress": progress(blueprint, done), "pin": pin_rows(mesh), "observed": True}
        sums, depth = forward(model, batch, **options)
        weights = batch.weights.astype(jnp.float32)
        return EvalSums(sums, jnp.sum(weights * token_bytes[batch.targets]), depth)

    if mesh.size > 1:
        step = shard_rows(step, mesh, P(BATCH))
    params = blueprint.shardings().params
    whole = replicated(mesh)
    return jax.jit(step, in_shardings=(params, whole, batch_sharding(mesh), whole), out_shardings=whole)
