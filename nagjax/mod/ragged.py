"""Computes only the tokens of a batch that a causal rule let in. Their number is data: a few sizes are compiled ahead,
and the smallest one that holds them runs; its spare places are filled with other tokens, which pass.

If each sequence has one token, a size counts rows of the batch, otherwise tokens of each sequence.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from nagjax.layers.cache import CachedLayer
from nagjax.layers.where import Where
from nagjax.mod.selection import on_any_device, portions, top_tokens
from nagjax.residual.rows import put, take
from pallas_kernels.placement import current_placement

PARTS = 8  # number of sizes; more would compute less and compile longer
WORTH_IT = {"rows": 8, "tokens": 128}  # a smaller batch or sequence is always computed as a whole


def sizes(batch: int, tokens: int, cached: bool) -> tuple[int, ...]:
    """The numbers of rows, or of tokens of a sequence, that are computed at a time, ascending; the last is all of them.
    It is the only one without a cache (such a pass judges a model), for a small batch, and on a mesh, where rows must
    stay on their devices."""
    whole, enough = (batch, WORTH_IT["rows"]) if tokens == 1 else (tokens, WORTH_IT["tokens"])
    if not cached or whole < enough or current_placement() is not None:
        return (whole,)
    return portions(whole, PARTS)[1:]


def needed(ran: Bool[Array, "B T"]) -> Int[Array, ""]:
    """The number of rows, or the largest number of tokens of a sequence, that run."""
    return on_any_device(jnp.sum(ran) if ran.shape[1] == 1 else jnp.max(jnp.sum(ran, axis=1), initial=0))


class Few(NamedTuple):
    """Some rows of a batch, indices [n]; or some tokens of each sequence, indices [B, k]; or all tokens, None."""

    indices: Int[Array, " n"] | Int[Array, "B k"] | None

    @classmethod
    def of(cls, ran: Bool[Array, "B T"], size: int, where: Where) -> "Few":
        """The tokens that run, and as many others as fill the size."""
        if size == (ran.shape[0] if ran.shape[1] == 1 else ran.shape[1]):
            return cls(None)
        if ran.shape[1] == 1:
            return cls(jnp.argsort(~ran[:, 0], stable=True)[:size])
        return cls(top_tokens(ran.astype(jnp.float32), where, size).indices)

    def take(self, tree: Any) -> Any:
        """Picks these tokens: leaves [B, T, ...] become [n, 1, ...] or [B, k, ...]."""
        if self.indices is None:
            return tree
        if self.indices.ndim == 1:
            return jax.tree.map(lambda x: jnp.asarray(x)[self.indices], tree)
        return take(jax.tree.map(jnp.asarray, tree), self.indices)

    def put(self, tree: Any, rows: Any) -> Any:
        """The tree with the rows of these tokens replaced by `rows`."""
        if self.indices is None:
            return rows
        if self.indices.ndim == 1:
            return jax.tree.map(lambda x, new: x.at[self.indices].set(new), tree, rows)
        return put(tree, rows, self.indices)

    def seen(self, known: Any, where: Where) -> tuple[Any, Where]:
        """What the queries of these tokens see, and its documents and positions."""
        if self.indices is None or self.indices.ndim == 2:
            return known, where
        if not isinstance(known, CachedLayer):
            return self.take((known, where))
        known = known.of(self.indices)
        return known, known.where
