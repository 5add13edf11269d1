"""Judges each step on the device: a bad step changes nothing but the step count and the guard.

A step is bad if its loss or the norm of its gradient is not finite, or if its loss is a spike: above the median of the
last `WINDOW` good losses by more than `spike` times their robust deviation, which is 1.4826 times the median distance
from the median (a normal distribution's standard deviation), and at least 1% of the median. Nothing is a spike before
the window is full. A step without a counted target teaches nothing: neither bad nor good, it changes the step count.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

WINDOW = 64
LEAST_DEVIATION = 0.01  # of the median: the measured deviation of a nearly constant loss would be too small

Tree = Any


class Guard(NamedTuple):
    """What judging a step needs from earlier steps; a part of the training state."""

    losses: Float[Array, "64"]  # of the last good steps, the newest last; NaN until there are that many
    good: Int[Array, ""]  # good steps so far, which are the optimizer's steps
    bad: Int[Array, ""]  # bad steps in a row until now


def new_guard() -> Guard:
    return Guard(jnp.full(WINDOW, jnp.nan, jnp.float32), jnp.int32(0), jnp.int32(0))


def is_good(guard: Guard, loss: Float[Array, ""], grad_norm: Float[Array, ""], spike: float) -> Bool[Array, ""]:
    """Whether the step with this loss and gradient norm may change the state. `spike` 0: only NaN and inf are bad."""
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if spike:
        good &= ~(loss > spike_limit(guard.losses, spike))  # the limit is NaN until the window is full
    return good


def spike_limit(losses: Float[Array, "W"], spike: float) -> Float[Array, ""]:
    """The highest loss that is not a spike; NaN if the window contains a NaN."""
    middle = jnp.median(losses)
    deviation = 1.4826 * jnp.median(jnp.abs(losses - middle))
    return middle + spike * jnp.maximum(deviation, LEAST_DEVIATION * jnp.abs(middle))


def remember(guard: Guard, good: Bool[Array, ""], loss: Float[Array, ""]) -> Guard:
    """The guard after a step: a bad step is counted, but its loss does not enter the window."""
    losses = jnp.concatenate([guard.losses[1:], loss[None].astype(jnp.float32)])
    return Guard(jnp.where(good, losses, guard.losses), guard.good + good, jnp.where(good, 0, guard.bad + 1))


def guarded(
    old: Tree, new: Tree, loss: Float[Array, ""], grad_norm: Float[Array, ""], count: Float[Array, ""], spike: float
) -> Tree:
    """The state after a step: all of `new`; after a bad step `old`, with only the step and the guard moved on; after
    one with a `count` of 0 targets, with only the step moved on."""
    good, empty = is_good(old.guard, loss, grad_norm, spike), count == 0
    guard = optax.tree.where(empty, old.guard, remember(old.guard, good, loss))
    return optax.tree.where(good & ~empty, new, old)._replace(step=new.step, guard=guard)
