"""The key/value cache of a routed attention that sees only selected tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nagjax.layers.cache import KeysValues
from nagjax.layers.where import Where

HIDDEN = -1  # the segment of a slot that no query sees


class SelectedCache(NamedTuple):
    """Keys and values of the tokens that ran, in order, with their positions, by layer.

    It holds as many tokens as run of a whole context in training; when it is full, later tokens skip.
    """

    keys: Float[Array, "L B K S Dh"]
    values: Float[Array, "L B K S Dh"]
    positions: Int[Array, "L B S"]
    used: Int[Array, "L B"]

    @classmethod
    def empty(cls, layers: int, batch: int, slots: int, heads: int, head_width: int, dtype) -> "SelectedCache":
        keys, values = jnp.zeros((2, layers, batch, heads, slots, head_width), dtype)
        return cls(keys, values, jnp.zeros((layers, batch, slots), jnp.int32), jnp.zeros((layers, batch), jnp.int32))

    def where(self, layer: Int[Array, ""]) -> Where:
        """The documents and positions of the slots; unused slots have the segment HIDDEN."""
        filled = jnp.arange(self.positions.shape[-1]) < self.used[layer][:, None]
        return Where(jnp.where(filled, 1, HIDDEN), self.positions[layer])

    def room(self, layer: Int[Array, ""], wanted: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
        """Which of the tokens that want to run still find a slot."""
        return with_room(wanted, self.positions.shape[-1], self.used[layer])

    def write(self, layer: Int[Array, ""], fresh: KeysValues, where: Where, ran: Bool[Array, "B T"]) -> "SelectedCache":
        """The cache with the keys and values of the tokens that ran appended."""
        slots = self.used[layer][:, None] + jnp.cumsum(ran, axis=1) - 1
        rows, slots = jnp.arange(ran.shape[0])[:, None], jnp.where(ran, slots, self.positions.shape[-1])
        put = lambda old, new: old.at[layer, rows, :, slots].set(new, mode="drop")  # noqa: E731
        keys, values = jax.tree.map(put, (self.keys, self.values), tuple(fresh))
        positions = self.positions.at[layer, rows, slots].set(where.positions, mode="drop")
        return SelectedCache(keys, values, positions, self.used.at[layer].add(jnp.sum(ran, axis=1)))


def with_room(wanted: Bool[Array, "B T"], room: int, used: Int[Array, " B"] | int = 0) -> Bool[Array, "B T"]:
    """The first of the tokens that want to run, as many as there is room for. used: the number of slots already
    taken."""
    before = jnp.asarray(used).reshape(-1, 1) + jnp.cumsum(wanted, axis=1)
    return wanted & (before <= room)


def with_room_by_document(wanted: Bool[Array, "B T"], room: int, where: Where) -> Bool[Array, "B T"]:
    """The first of each document's tokens that want to run, as many as there is room for: each packed document has room
    of its own, as it has when it is sampled. Documents follow each other in a row."""
    before = jnp.cumsum(wanted, axis=1)
    begins = jnp.concatenate([jnp.ones_like(wanted[:, :1]), where.segments[:, 1:] != where.segments[:, :-1]], axis=1)
    earlier = jax.lax.cummax(jnp.where(begins, before - wanted, 0), axis=1)
    return wanted & (before - earlier <= room)
