"""The key/value cache of a routed attention that only sees selected tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nagjax.layers.attention import KVCache
from nagjax.layers.where import Where

HIDDEN = -1  # the segment of a slot that no query sees


class SelectedCache(NamedTuple):
    """Keys and values of the tokens that ran, in order, with the positions they stood at.

    It holds as many tokens as run of a whole context in training; when it is full, later tokens skip.
    """

    keys: Float[Array, "B S K Dh"]
    values: Float[Array, "B S K Dh"]
    positions: Int[Array, "B S"]
    used: Int[Array, " B"]

    @classmethod
    def empty(cls, keys_values: tuple[int, ...], dtype) -> "SelectedCache":
        """Of shape [..., B, S, K, Dh]."""
        keys, values = jnp.zeros((2, *keys_values), dtype)
        return cls(keys, values, jnp.zeros(keys_values[:-2], jnp.int32), jnp.zeros(keys_values[:-3], jnp.int32))

    @property
    def where(self) -> Where:
        """Of the slots."""
        filled = jnp.arange(self.positions.shape[1]) < self.used[:, None]
        return Where(jnp.where(filled, 1, HIDDEN), self.positions)

    @property
    def known(self) -> KVCache:
        return KVCache(self.keys, self.values)

    def room(self, wanted: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
        """Which of the tokens that want to run find a slot."""
        return with_room(wanted, self.keys.shape[1], self.used)

    def write(self, fresh: KVCache, where: Where, ran: Bool[Array, "B T"]) -> "SelectedCache":
        """With the tokens that ran behind those that are in it."""
        slots = self.used[:, None] + jnp.cumsum(ran, axis=1) - 1
        rows, slots = jnp.arange(ran.shape[0])[:, None], jnp.where(ran, slots, self.keys.shape[1])
        put = lambda old, new: old.at[rows, slots].set(new, mode="drop")  # noqa: E731
        keys, values = jax.tree.map(put, (self.keys, self.values), tuple(fresh))
        return SelectedCache(keys, values, put(self.positions, where.positions), self.used + jnp.sum(ran, axis=1))


def with_room(wanted: Bool[Array, "B T"], room: int, used: Int[Array, " B"] | int = 0) -> Bool[Array, "B T"]:
    """The first tokens that want to run, as many as there is room for."""
    before = jnp.asarray(used).reshape(-1, 1) + jnp.cumsum(wanted, axis=1)
    return wanted & (before <= room)


def with_room_by_document(wanted: Bool[Array, "B T"], room: int, where: Where) -> Bool[Array, "B T"]:
    """The first tokens of each document that want to run, as many as there is room for: packed documents have a cache
    each, as they have when they are sampled. Documents stand one behind the other."""
    before = jnp.cumsum(wanted, axis=1)
    begins = jnp.concatenate([jnp.ones_like(wanted[:, :1]), where.segments[:, 1:] != where.segments[:, :-1]], axis=1)
    earlier = jax.lax.cummax(jnp.where(begins, before - wanted, 0), axis=1)
    return wanted & (before - earlier <= room)
