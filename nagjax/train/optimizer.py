"""The optimizer, whose settings depend on each parameter's role, and the learning-rate schedule."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from nagjax.errors import UserError
from nagjax.runs.config import OptimizerConfig

Tree = Any

MUON_RMS = 0.2  # update RMS that lets Muon share AdamW's learning rate (Liu et al. 2025, arXiv:2502.16982)


def check_schedule(config: OptimizerConfig) -> None:
    """Raises UserError if the warm-up and the cool-down together are longer than the training. The cool-down would then
    begin late, and the training would end before the rate has fallen."""
    if config.schedule == "wsd" and config.warmup + config.cooldown > 1:
        most = math.floor((1 - config.warmup) * 1e6 + 1e-6) / 1e6  # rounded down, so that giving it passes
        left = f"the warm-up takes {config.warmup:g} of the steps, so at most {most:g} is left for it"
        raise UserError("cooldown", config.cooldown, f"{left}; or give a shorter warm-up")


def schedule(config: OptimizerConfig, peak: float, steps: int) -> optax.Schedule:
    """Learning rate as a function of the number of updates made so far: linear warm-up, then cosine decay, a constant,
    or a constant with a linear cool-down (wsd). Cosine and wsd reach `final` times the peak at `steps`, unless the
    warm-up takes all steps; the last update comes after `steps - 1` others, so its rate is slightly higher."""
    warmup = max(round(config.warmup * steps), 1)
    rise = optax.linear_schedule(peak / warmup, peak, warmup - 1) if warmup > 1 else optax.constant_schedule(peak)
    if config.schedule == "cosine":
        rest = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=config.final)
    elif config.schedule == "constant":
        rest = optax.constant_schedule(peak)
    else:
        cooldown = max(round(config.cooldown * steps), 1)
        if config.warmup + config.cooldown <= 1:  # else an old run, which keeps its schedule
            cooldown = min(cooldown, max(steps - warmup, 1))  # warm-up and cool-down may both have been rounded up
        fall = optax.linear_schedule(peak, config.final * peak, cooldown)
        rest = optax.join_schedules([optax.constant_schedule(peak), fall], [max(steps - warmup - cooldown, 0)])
    return optax.join_schedules([rise, rest], [warmup])


def make_optimizer(config: OptimizerConfig, peak: float, steps: int, factors: Tree) -> optax.GradientTransformation:
    """AdamW, or Muon for the matrices and AdamW for all else.

    `peak` is the highest learning rate, reached after the warm-up of a training of `steps` updates. `factors` is a tree
    of `Factors`, shaped like the parameters. It gives each parameter's role, which sets its relative learning rate
    (`config.rates`) and whether it decays (`config.decay`), and the factors by which the model's parametrization scales
    its rate, decay and epsilon.
    """
    adam = optax.scale_by_adam(config.beta1, config.beta2, eps=config.epsilon)
    if config.optimizer == "muon":
        labels = jax.tree.map(lambda own: "muon" if own.role == "matrix" else "adam", factors)
        direction = optax.partition({"muon": _muon(factors), "adam": adam}, labels)
    else:
        direction = adam
    rates = jax.tree.map(lambda own: own.rate * getattr(config.rates, own.role), factors)
    return optax.chain(
        optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
        *_epsilons(factors),
        direction,
        *_decays(config, factors),
        optax.stateless(lambda updates, _: jax.tree.map(lambda u, rate: rate * u, updates, rates)),
        optax.scale_by_learning_rate(schedule(config, peak, steps)),
    )


def _epsilons(factors: Tree) -> list[optax.GradientTransformation]:
    """Scales epsilon per parameter. AdamW's update depends only on the ratio of gradient to epsilon, so each gradient
    is divided by the factor that would multiply epsilon."""
    if all(own.epsilon == 1.0 for own in jax.tree.leaves(factors)):
        return []
    return [optax.stateless(lambda grads, _: jax.tree.map(lambda g, own: g / own.epsilon, grads, factors))]


def _decays(config: OptimizerConfig, factors: Tree) -> list[optax.GradientTransformation]:
    """Weight decay: one transformation for each distinct decay factor."""
    found = sorted({own.decay for own in jax.tree.leaves(factors) if own.role in config.decay})
    mask = lambda factor: jax.tree.map(lambda own: own.role in config.decay and own.decay == factor, factors)  # noqa: E731
    return [optax.add_decayed_weights(config.weight_decay * factor, mask=mask(factor)) for factor in found]


def _muon(factors: Tree) -> optax.GradientTransformation:
    """Orthogonalised momentum of every matrix, scaled to AdamW's update size.

    The axes of a matrix are named, because matrices are stacked over depth, [L, in, out]. By default optax would take
    all two-dimensional arrays for matrices, which here are tables and stacked vectors.
    """
    matrices = jax.tree.map(lambda own: own if own.role == "matrix" else optax.MaskedNode(), factors)
    numbers = jax.tree.map(lambda own: optax.contrib.MuonDimensionNumbers(own.inputs, own.outputs), matrices)
    orthogonal = optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)

    def rescaled(update, own):
        side = max(math.prod(update.shape[axis] for axis in axes) for axes in (own.inputs, own.outputs))
        return MUON_RMS * jnp.sqrt(jnp.float32(side)) * update

    def rescale(updates, _):
        return jax.tree.map(rescaled, updates, matrices)

    return optax.chain(orthogonal, optax.stateless(rescale))
