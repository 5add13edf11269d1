"""Kinds of branches. Every branch is a callable; one in which tokens read each other has two more methods."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from nagjax.layers.where import Where


@runtime_checkable
class Mixing(Protocol):
    """A branch such as attention, which takes queries separately from keys and values, so that queries may be fewer.

    `keys_values(x [B, S, D], where) -> known`, any pytree of arrays [B, S, ...]; `mix(x [B, k, D], where, known, seen)
    -> update [B, k, D]`, the update of tokens that stand at `where` from keys and values that stand at `seen`.
    A branch without these methods works token by token: `branch(x [B, k, D]) -> update [B, k, D]`.
    """

    def keys_values(self, x: Float[Array, "B S D"], where: Where) -> Any: ...

    def mix(self, x: Float[Array, "B k D"], where: Where, known: Any, seen: Where) -> Float[Array, "B k D"]: ...


@runtime_checkable
class MixingAtOnce(Mixing, Protocol):
    """A branch that can do both steps in one call, which may be faster."""

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
    """The update of all tokens by a branch of either kind, and its cache. New keys and values are written into a cache,
    and queries see all of it."""
    if not isinstance(branch, Mixing):
        return branch(x), cache
    if cache is None:
        return between(branch, x, where, x, where), None
    cache = cache.write(branch.keys_values(x, where), where)
    return branch.mix(x, where, cache, cache.where), cache
