"""Averages of the top-k cuts of training. A threshold compares scores with them when later tokens are not available."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nagjax.errors import UserError


def mean_cut(cut: Float[Array, "*S B"]) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
    """The mean over the sequences that have a cut, -inf if none has, and the number of these sequences, float32."""
    known = jnp.isfinite(cut)
    rows = jnp.sum(known, axis=-1)
    mean = jnp.sum(jnp.where(known, cut, 0.0), axis=-1) / jnp.maximum(rows, 1)
    return jnp.where(rows > 0, mean, -jnp.inf), rows.astype(jnp.float32)


def moved_cut(
    old: Float[Array, "*S"], new: Float[Array, "*S"], rows: Float[Array, "*S"], decay: float | Float[Array, ""]
) -> Float[Array, "*S"]:
    """The moving average after one step, given `new`, the mean cut over `rows` sequences. With 0 rows it stays as it
    is; an average that is not finite, because nothing is known yet, is replaced."""
    mixed = jnp.where(jnp.isfinite(old), decay * old + (1.0 - decay) * new, new)
    return jnp.where(rows > 0, mixed, old)


def decay_after(steps: int | Float[Array, ""] | Int[Array, ""], decay: float) -> Float[Array, ""]:
    """The moving average's decay after t = `steps` training steps, min(decay, t / (t + 10)). It starts low so that
    early cuts, taken while NAG's angles still rise, are soon forgotten."""
    done = jnp.asarray(steps, jnp.float32)
    return jnp.minimum(decay, done / (done + 10.0))


def every_cut(cuts: Float[Array, " S"] | None, sublayers: int) -> Float[Array, " S"]:
    """The given cuts [S], or zeros if there are none. Raises UserError as `check_cuts` does."""
    check_cuts(cuts, sublayers)
    return jnp.zeros(sublayers) if cuts is None else jnp.asarray(cuts)


def check_cuts(cuts: Float[Array, " S"] | None, sublayers: int) -> None:
    """Raises UserError unless there is one cut for each sublayer, or `cuts` is None."""
    if cuts is not None and np.shape(cuts) != (sublayers,):
        raise UserError("cuts", np.shape(cuts), f"give {sublayers} numbers, one for a sublayer")
