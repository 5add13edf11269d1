"""Adaptive depth: one threshold for all sublayers and tokens, held where the average rate is the one asked for.

The number of tokens that a sublayer runs is then data, but XLA needs static shapes. So every sublayer is compiled in
five sizes, from none to all of a sequence's tokens in quarters. In each step it takes the smallest size that holds the
tokens above the threshold in every sequence; the spare places are filled with tokens that pass. Nothing is ever
dropped, so training runs the same tokens as the causal rule does when sampling. The size is data of the scan over
depth: the program does not grow with depth, and a changed rate of a sublayer compiles nothing anew. The alternative, a
budget of (token, sublayer) pairs for a whole step, would have to know what later sublayers need before it serves the
first one.
"""

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nagjax.mod.selection import portions

SIZES = 4  # more would pad less and compile longer
GRID = 33  # number of thresholds at which the tokens above are counted
SMOOTHING = 0.5  # weight of the previous step's threshold, in the logarithm
REPAID = 0.1  # share of the debt (`Control`) that the next step makes up for


def sizes(tokens: int) -> tuple[int, ...]:
    """The numbers of tokens of a sequence for which a sublayer is compiled, ascending."""
    return portions(tokens, SIZES)


def grid(cut: Float[Array, ""]) -> Float[Array, " G"]:
    """Thresholds around the current one: from a quarter of it to four times it, with the current one in the middle. If
    none is known yet, from 2^-14 to 2^3."""
    first = jnp.exp2(jnp.linspace(-14.0, 3.0, GRID))
    return jnp.where(jnp.isfinite(cut) & (cut > 0), cut * jnp.exp2(jnp.linspace(-2.0, 2.0, GRID)), first)


class Pool(NamedTuple):
    """Counts over all routed sublayers and tokens of a batch: the (token, sublayer) pairs that score above each
    threshold of the grid, the pairs that ran, and all pairs."""

    above: Float[Array, " G"]
    ran: Float[Array, ""]
    pairs: Float[Array, ""]


class Control(NamedTuple):
    """The threshold, and the sum over all steps of the skipped share minus the rate."""

    cut: Float[Array, ""]
    debt: Float[Array, ""]


def controlled(control: Control, pool: Pool, rate: float) -> Control:
    """The state for the next step. The threshold moves towards the value that would have let in 1 - rate of the pool,
    plus a share of the debt: angles drift while a model learns, and a threshold that follows a drift lags behind it. It
    is interpolated between two thresholds of the grid by logarithm, and smoothed in time, because a batch is only a
    sample."""
    cut, debt = control
    known = jnp.isfinite(cut) & (cut > 0)
    pairs = jnp.maximum(pool.pairs, 1.0)
    debt = debt + jnp.where(known & (pool.pairs > 0), 1.0 - pool.ran / pairs - rate, 0.0)
    keep = jnp.clip(1.0 - rate + REPAID * debt, 0.0, 1.0)
    found = jnp.interp(keep, (pool.above / pairs)[::-1], jnp.log(grid(cut))[::-1])
    before = jnp.where(known, jnp.log(jnp.where(known, cut, 1.0)), found)
    moved = jnp.exp(SMOOTHING * before + (1.0 - SMOOTHING) * found)
    return Control(jnp.where(pool.pairs > 0, moved, cut), debt)


def switch(index: Int[Array, ""], branches: Sequence[Callable[[Any], Any]], operands: Any) -> Any:
    """`jax.lax.switch` over functions from a pytree to floats. Only the operands are saved for the backward pass, which
    runs the chosen branch again. (By default JAX saves the intermediate values of all branches, zeros for those that
    were not taken.) Reverse mode only."""
    leaves, tree = jax.tree.flatten(operands)
    kinds = ["fixed" if not hasattr(x, "dtype") else "float" if _is_float(x) else "other" for x in leaves]
    floats, others = ([x for x, own in zip(leaves, kinds, strict=True) if own == kind] for kind in ("float", "other"))

    def whole(branch):
        def run(floats, others):
            left = {"float": iter(floats), "other": iter(others)}
            filled = [x if own == "fixed" else next(left[own]) for x, own in zip(leaves, kinds, strict=True)]
            return branch(tree.unflatten(filled))

        return run

    runs = [whole(branch) for branch in branches]
    context = contextvars.copy_context()  # JAX traces the backward pass when the platform and kernels here are unset

    def pull(run):
        return lambda floats, others, cotangent: jax.vjp(lambda own: run(own, others), floats)[1](cotangent)[0]

    @jax.custom_vjp
    def apply(index, floats, others):
        return jax.lax.switch(index, runs, floats, others)

    def forward(index, floats, others):
        return apply(index, floats, others), (index, floats, others)

    def backward(saved, cotangent):
        index, floats, others = saved
        pulls = [pull(run) for run in runs]
        return None, context.copy().run(jax.lax.switch, index, pulls, floats, others, cotangent), None

    apply.defvjp(forward, backward)
    return apply(index, floats, others)


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
