"""Judges each step on the device. A bad step changes nothing but the step count and the guard.

A step is bad if its loss or the norm of its gradient is not finite, or if its loss is a spike. The loss is a spike if
it exceeds the median of the last `WINDOW` good losses by more than `spike` robust deviations. The robust deviation is
1.4826 times the median distance from the median (for a normal distribution, its standard deviation), and at least 1% of
the median. Nothing is a spike before the window is full. A step without a counted target teaches nothing and is neither
bad nor good: it changes only the step count.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

WINDOW = 64
LEAST_DEVIATION = 0.01  # as a share of the median: the measured deviation of a nearly constant loss would be too small

Tree = Any


class Guard(NamedTuple):
    """What judging a step needs from earlier steps; a part of the training state."""

    losses: Float[Array, "64"]  # of the last good steps, the newest last; NaN until there are that many
    good: Int[Array, ""]  # good steps so far, which are the optimizer's steps
    bad: Int[Array, ""]  # bad steps in a row until now


def new_guard() -> Guard:
    return Guard(jnp.full(WINDOW, jnp.nan, jnp.float32), jnp.int32(0), jnp.int32(0))


def is_good(guard: Guard, loss: Float[Array, ""], grad_norm: Float[Array, ""], spike: float) -> Bool[Array, ""]:
    """Whether a step with this loss (nats) and gradient norm may change the state. With `spike` 0 only NaN and inf are
    bad."""
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if spike:
        good &= ~(loss > spike_limit(guard.losses, spike))  # the limit is NaN until the window is full
    return good


def spike_limit(losses: Float[Array, "W"], spike: float) -> Float[Array, ""]:
    """The highest loss (nats) that is not a spike; NaN if the window contains a NaN."""
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
    """The state after a step: `new` after a good step; after a bad one `old` with only the step and the guard updated;
    after a step whose `count` of targets is 0, `old` with only the step updated."""
    good, empty = is_good(old.guard, loss, grad_norm, spike), count == 0
    guard = optax.tree.where(empty, old.guard, remember(old.guard, good, loss))
    return optax.tree.where(good & ~empty, new, old)._replace(step=new.step, guard=guard)
