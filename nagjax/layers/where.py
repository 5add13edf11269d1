"""The document and position of each token, and which other tokens it may see."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from nagjax.errors import UserError

Window = int | Int[Array, ""] | None  # tokens that a query sees, counting back from its own; None: all


class Where(NamedTuple):
    """The document of each token (1, 2, ...; 0 is padding) and the token's position in it. The tokens of a document are
    adjacent, in the order of their positions."""

    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]

    @classmethod
    def whole(cls, batch: int, tokens: int) -> "Where":
        """One document per row."""
        positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
        return cls(jnp.ones((batch, tokens), jnp.int32), positions)

    def of(self, shape: tuple[int, ...]) -> "Where":
        """Returns itself. Raises UserError unless it is for tokens of this shape."""
        for name, given in self._asdict().items():
            if jnp.shape(given) != shape:
                raise UserError(f"where.{name}", jnp.shape(given), f"give one for each token, {list(shape)}")
        return self


def seen_mask(
    queries: Where, keys: Where, window: Window = None, causal: bool = True, by_key: bool = False
) -> Bool[Array, "B 1 Tq Tk"] | Bool[Array, "B 1 Tk Tq"]:
    """True where the key is in the query's document and, if `causal`, not after the query and less than `window` tokens
    before it. Padding sees padding, so that every row has a visible key. `by_key`: swaps the last two axes, also in
    memory."""
    of_queries = lambda x: x[:, None, :] if by_key else x[:, :, None]  # noqa: E731
    of_keys = lambda x: x[:, :, None] if by_key else x[:, None, :]  # noqa: E731
    seen = of_queries(queries.segments) == of_keys(keys.segments)
    if causal:
        behind = of_queries(queries.positions) - of_keys(keys.positions)
        seen &= behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return seen[:, None]
