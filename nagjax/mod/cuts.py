"""The top-k cuts of training, averaged: what a threshold compares scores with where later tokens are not there."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nagjax.errors import UserError


def mean_cut(cut: Float[Array, "*S B"]) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
    """Mean over the sequences that have a cut, -inf where none has, and the number of these sequences."""
    known = jnp.isfinite(cut)
    rows = jnp.sum(known, axis=-1)
    mean = jnp.sum(jnp.where(known, cut, 0.0), axis=-1) / jnp.maximum(rows, 1)
    return jnp.where(rows > 0, mean, -jnp.inf), rows.astype(jnp.float32)


def moved_cut(
    old: Float[Array, "*S"], new: Float[Array, "*S"], rows: Float[Array, "*S"], decay: float | Float[Array, ""]
) -> Float[Array, "*S"]:
    """The moving average, one step on, with the mean of so many sequences: without any it stays, and one that is not
    finite, of which nothing is known yet, is replaced."""
    mixed = jnp.where(jnp.isfinite(old), decay * old + (1.0 - decay) * new, new)
    return jnp.where(rows > 0, mixed, old)


def decay_after(steps: int | Float[Array, ""] | Int[Array, ""], decay: float) -> Float[Array, ""]:
    """The average's decay after so many training steps, min(decay, t / (t + 10)): early cuts, from when NAG's angles
    still rise, are soon forgotten."""
    done = jnp.asarray(steps, jnp.float32)
    return jnp.minimum(decay, done / (done + 10.0))


def every_cut(cuts: Float[Array, " S"] | None, sublayers: int) -> Float[Array, " S"]:
    """The cuts that are given, zeros where none are. Raises UserError as `check_cuts`."""
    check_cuts(cuts, sublayers)
    return jnp.zeros(sublayers) if cuts is None else jnp.asarray(cuts)


def check_cuts(cuts: Float[Array, " S"] | None, sublayers: int) -> None:
    """Raises UserError for another number of cuts than one for each sublayer."""
    if cuts is not None and np.shape(cuts) != (sublayers,):
        raise UserError("cuts", np.shape(cuts), f"give {sublayers} numbers, one for a sublayer")
