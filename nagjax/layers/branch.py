"""What a branch can do. Every branch is a callable on rows; one whose tokens read each other says so by two methods."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from nagjax.layers.where import Where


@runtime_checkable
class Mixing(Protocol):
    """A branch that takes queries apart from keys and values, so that the queries may be fewer: attention.

    `keys_values(x [B, S, D], where) -> known`, any pytree of arrays [B, S, ...]; `mix(x [B, k, D], where, known, seen)
    -> update [B, k, D]`, the update of tokens that stand at `where` from keys and values that stand at `seen`.
    A branch without these methods works token by token: `branch(x [B, k, D]) -> update [B, k, D]`.
    """

    def keys_values(self, x: Float[Array, "B S D"], where: Where) -> Any: ...

    def mix(self, x: Float[Array, "B k D"], where: Where, known: Any, seen: Where) -> Float[Array, "B k D"]: ...


@runtime_checkable
class MixingAtOnce(Mixing, Protocol):
    """One that can do both in one go, which may be faster."""

    def between(
        self, x: Float[Array, "B k D"], where: Where, source: Float[Array, "B S D"], seen: Where
    ) -> Float[Array, "B k D"]: ...


def between(
    branch: Mixing, x: Float[Array, "B k D"], where: Where, source: Float[Array, "B S D"], seen: Where
) -> Float[Array, "B k D"]:
    """The update of the tokens `x`, which stand at `where`, from the tokens `source`, which stand at `seen`."""
    if isinstance(branch, MixingAtOnce):
        return branch.between(x, where, source, seen)
    return branch.mix(x, where, branch.keys_values(source, seen), seen)


def update_of(branch: Any, x: Float[Array, "B T D"], where: Where, cache: Any = None) -> tuple[Array, Any]:
    """The update of all tokens by a branch of either kind, and its cache. With a cache, new keys and values are written
    at their positions and the queries see all of it."""
    if not isinstance(branch, Mixing):
        return branch(x), cache
    if cache is None:
        return between(branch, x, where, x, where), None
    cache = cache.write(branch.keys_values(x, where), where)
    return branch.mix(x, where, cache, cache.where, "xla"), cache
