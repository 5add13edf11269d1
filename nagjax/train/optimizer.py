"""The optimizer, by role of each parameter, and the learning-rate schedule."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from nagjax.runs.config import OptimizerConfig

Tree = Any

MUON_RMS = 0.2  # update RMS that lets Muon share AdamW's learning rate (Liu et al. 2025, arXiv:2502.16982)


def schedule(config: OptimizerConfig, peak: float, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up, then cosine, constant, or constant with a linear cool-down (wsd)."""
    warmup = max(round(config.warmup * steps), 1)
    rise = optax.linear_schedule(peak / warmup, peak, warmup - 1) if warmup > 1 else optax.constant_schedule(peak)
    if config.schedule == "cosine":
        rest = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=config.final)
    elif config.schedule == "constant":
        rest = optax.constant_schedule(peak)
    else:
        cooldown = max(round(config.cooldown * steps), 1)
        fall = optax.linear_schedule(peak, config.final * peak, cooldown)
        rest = optax.join_schedules([optax.constant_schedule(peak), fall], [max(steps - warmup - cooldown, 0)])
    return optax.join_schedules([rise, rest], [warmup])


def make_optimizer(
    config: OptimizerConfig, peak: float, steps: int, gate_rate: float, roles: Tree
) -> optax.GradientTransformation:
    """AdamW, or Muon for the matrices.

    `roles` is a tree of role names, shaped like the parameters: only "matrix" has weight decay; "gate" learns at
    `gate_rate` times the learning rate.
    """
    adam = optax.scale_by_adam(config.beta1, config.beta2, eps=1e-8)
    if config.optimizer == "muon":
        labels = jax.tree.map(lambda role: "muon" if role == "matrix" else "adam", roles)
        direction = optax.partition({"muon": _muon(), "adam": adam}, labels)
    else:
        direction = adam
    rates = jax.tree.map(lambda role: gate_rate if role == "gate" else 1.0, roles)
    decays = jax.tree.map(lambda role: role == "matrix", roles)
    return optax.chain(
        optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
        direction,
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        optax.stateless(lambda updates, _: jax.tree.map(lambda u, rate: rate * u, updates, rates)),
        optax.scale_by_learning_rate(schedule(config, peak, steps)),
    )


def _muon() -> optax.GradientTransformation:
    """Orthogonalised momentum of every matrix, scaled to AdamW's update size.

    The two axes of a matrix are named, because matrices are stacked over depth, [L, in, out]: by default optax would
    take two-dimensional arrays for matrices, which here are tables and stacked vectors.
    """
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    orthogonal = optax.contrib.scale_by_muon(
        weight_dimension_numbers=lambda params: jax.tree.map(lambda _: matrix, params)
    )

    def rescale(updates, _):
        return jax.tree.map(lambda u: MUON_RMS * jnp.sqrt(jnp.float32(max(u.shape[-2:]))) * u, updates)

    return optax.chain(orthogonal, optax.stateless(rescale))
