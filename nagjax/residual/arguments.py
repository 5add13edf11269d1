"""What users give to a residual in their own model: how far training is, and rows of any shape."""

import math
import warnings
from pathlib import Path
from typing import Any

import flax
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from nagjax.errors import UserError
from nagjax.ranges import Share, check_value


def say(text: str) -> None:
    """Warns, pointing at the line of the user's code that called nagjax."""
    between = Path(__file__).parents[1], *(Path(str(module.__file__)).parent for module in (flax, jax))
    warnings.warn(text, stacklevel=2, skip_file_prefixes=tuple(map(str, between)))


def share_done(progress: Any) -> Float[Array, ""]:
    """`progress` as float32. Raises UserError unless it is a number from 0 to 1; a traced value is not checked."""
    progress = progress[...] if isinstance(progress, nnx.Variable) else progress
    if np.shape(progress):
        raise UserError("progress", np.shape(progress), "give one number for all rows, step / steps")
    if isinstance(progress, jax.core.Tracer) and jnp.issubdtype(progress.dtype, jnp.integer):
        raise UserError("progress", progress.dtype.name, "give a share of the training, step / steps, not a step")
    if not isinstance(progress, jax.core.Tracer):
        check_value("progress", np.asarray(progress).item(), Share, "it is step / steps, and 1.0 after training")
    return jnp.asarray(progress, jnp.float32)


def folded(x: Float[Array, "*lead D"], lead: tuple[int, ...], field: str = "x") -> Float[Array, "B T D"]:
    """x as [B, T, D]. The first axis stays, so that a batch that is split over devices stays split. Raises UserError,
    for `field`, if on an Explicit mesh an axis is split that cannot stay so."""
    if any(names is not None for names in split_by(x)[2 : len(lead)]):
        fix = "on an Explicit mesh only the first two axes before the features may be split: use jax.sharding.reshard"
        raise UserError(field, str(jax.typeof(x).sharding.spec), fix)
    return x.reshape(lead[0] if lead else 1, math.prod(lead[1:]), x.shape[-1])


def split_by(x: jax.Array) -> tuple[Any, ...]:
    """The mesh axes that split each axis of x, None for those that are whole; of an Explicit mesh only."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))
