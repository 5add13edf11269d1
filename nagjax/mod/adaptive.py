"""Adaptive depth: one threshold over all sublayers and tokens, held where the average rate is the one asked for.

How many tokens a sublayer runs is then data, and XLA wants it static. Here every sublayer is compiled in five sizes,
none to all of a sequence's tokens in quarters, and takes in each step the smallest that holds what the threshold lets
in of any sequence. The spare places are filled with tokens that pass. Nothing is ever dropped, so training runs the
very tokens that the causal rule runs when sampling; the size is data of the scan over depth, so the program does not
grow with it, and no rate that a sublayer comes to have compiles anything anew. The other way, a budget of (token,
sublayer) pairs for a whole step, would have to know what later sublayers ask for before it serves the first.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nagjax.mod.selection import portions

SIZES = 4  # more would pad less and compile longer
GRID = 33  # thresholds at which the tokens above are counted
SMOOTHING = 0.5  # of the logarithm of the threshold, from step to step
REPAID = 0.1  # of what has been skipped too much or too little so far, in the next step


def sizes(tokens: int) -> tuple[int, ...]:
    """Tokens of a sequence that a sublayer may be compiled for, ascending."""
    return portions(tokens, SIZES)


def grid(cut: Float[Array, ""]) -> Float[Array, " G"]:
    """Thresholds around the present one, a quarter to four times it, itself in the middle; 2^-14 to 2^3 at first."""
    first = jnp.exp2(jnp.linspace(-14.0, 3.0, GRID))
    return jnp.where(jnp.isfinite(cut) & (cut > 0), cut * jnp.exp2(jnp.linspace(-2.0, 2.0, GRID)), first)


class Pool(NamedTuple):
    """Over all routed sublayers and tokens of a batch: how many pairs score above each threshold of the grid, how many
    ran, and how many there are."""

    above: Float[Array, " G"]
    ran: Float[Array, ""]
    pairs: Float[Array, ""]


class Control(NamedTuple):
    """The one threshold, and by how much more than the rate was skipped so far, summed over steps."""

    cut: Float[Array, ""]
    debt: Float[Array, ""]


def controlled(control: Control, pool: Pool, rate: float) -> Control:
    """What rules the next step. The threshold goes to where it would have let in 1 - rate of the pool, and a share of
    the debt besides (between two of the grid by its logarithm, smoothed in time: a batch is a sample): angles drift
    while a model learns, and what follows a drift is late."""
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
    """`jax.lax.switch` over functions of a pytree to floats, of which nothing but the operands is kept for the backward
    pass: that runs the same branch again. (Left to itself JAX keeps the intermediate values of all branches, zeros for
    those that were not taken.) Reverse mode only.
    """
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

    def pull(run):
        return lambda floats, others, cotangent: jax.vjp(lambda own: run(own, others), floats)[1](cotangent)[0]

    @jax.custom_vjp
    def apply(index, floats, others):
        return jax.lax.switch(index, runs, floats, others)

    def forward(index, floats, others):
        return apply(index, floats, others), (index, floats, others)

    def backward(saved, cotangent):
        index, floats, others = saved
        return None, jax.lax.switch(index, [pull(run) for run in runs], floats, others, cotangent), None

    apply.defvjp(forward, backward)
    return apply(index, floats, others)


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
