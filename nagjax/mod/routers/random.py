"""The random router: the control that every other router must beat."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from nagjax.mod.routers import Router
from pallas_kernels.placement import varying


@dataclasses.dataclass(frozen=True)
class RandomRouter(Router):
    """Scores uniform in [0, 1), independent between sublayers, rows, documents and positions.

    A score is a hash of the token's place and of the pass's noise, and does not depend on other tokens: decoding token
    by token gives the same scores as a pass over the whole text. Inside a `shard_map` whose types are checked, as they
    are by default, each device's rows count from those of the devices before it.
    """

    name: ClassVar[str] = "random"
    common: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    def score(self, scheme, stream, own, at, where, noise):
        rows = jnp.arange(where.positions.shape[0])[:, None]
        if axes := varying(jax.tree.leaves(stream)[0]):
            rows = rows + len(rows) * jax.lax.axis_index(axes)
        word = noise.astype(jnp.uint32)
        for part in (at.index, rows, where.segments, where.positions):
            word = _mixed(word ^ jnp.asarray(part).astype(jnp.uint32))
        return (word >> 8).astype(jnp.float32) * 2.0**-24


def _mixed(word: jax.Array) -> jax.Array:
    """A bijection of 32-bit words in which every input bit reaches every output bit: multiply and shift, twice."""
    word = word + jnp.uint32(0x9E3779B9)
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
