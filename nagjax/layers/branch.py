"""Kinds of branches. Every branch is a callable; a branch in which tokens read each other has more methods."""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float

from nagjax.errors import UserError
from nagjax.layers.where import Where


class Update(NamedTuple):
    """What a branch returns to the sublayer: the update and the branch's cache (None without one). Only a `Choosing`
    branch also returns which tokens ran (None: all), and notes, float32, which are sums over the real tokens of each
    sequence."""

    value: Float[Array, "B T D"]
    cache: Any = None
    ran: Bool[Array, "B T"] | None = None
    notes: dict[str, Float[Array, "B ..."]] = {}  # noqa: RUF012 (never changed)


@runtime_checkable
class Mixing(Protocol):
    """A branch such as attention that takes queries separately from keys and values, so that there may be fewer
    queries.

    `keys_values(x [B, S, D], where) -> known`, any pytree of arrays [B, S, ...];
    `mix(x [B, k, D], where, known, seen) -> update [B, k, D]`, the update of the tokens that stand at `where` from keys
    and values that stand at `seen`. A branch without these methods works token by token:
    `branch(x [B, k, D]) -> update [B, k, D]`.
    """

    def keys_values(self, x: Float[Array, "B S D"], where: Where) -> Any: ...

    def mix(self, x: Float[Array, "B k D"], where: Where, known: Any, seen: Where) -> Float[Array, "B k D"]: ...


@runtime_checkable
class MixingAtOnce(Mixing, Protocol):
    """A `Mixing` branch that can do both steps in one call, which may be faster."""

    def between(
        self, x: Float[Array, "B k D"], where: Where, source: Float[Array, "B S D"], seen: Where
    ) -> Float[Array, "B k D"]: ...


@runtime_checkable
class InOrder(Protocol):
    """A branch whose tokens read those right before them, such as a convolution: it runs for all tokens of a pass, in
    their order. It takes and returns a cache of its own kind."""

    def in_order(self, x: Float[Array, "B T D"], where: Where, cache: Any) -> tuple[Float[Array, "B T D"], Any]: ...


def fitting(update: Any, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
    """Returns the update of the rows `x`. Raises UserError if it has another shape, which would be broadcast, or holds
    numbers that are not floating, which would be rounded or lose their imaginary part."""
    shape = getattr(update, "shape", None)
    if shape != x.shape:
        got = type(update).__name__ if shape is None else shape
        raise UserError("update", got, f"a branch must return the shape that it reads, {x.shape}")
    if not jnp.issubdtype(update.dtype, jnp.floating):
        raise UserError("update", jnp.dtype(update.dtype).name, "a branch must return floating-point numbers")
    return update


def between(
    branch: Mixing, x: Float[Array, "B k D"], where: Where, source: Float[Array, "B S D"], seen: Where
) -> Float[Array, "B k D"]:
    """The update of the tokens `x`, which stand at `where`, from the tokens `source`, which stand at `seen`."""
    if isinstance(branch, MixingAtOnce):
        return branch.between(x, where, source, seen)
    return fitting(branch.mix(x, where, branch.keys_values(source, seen), seen), x)


@runtime_checkable
class Choosing(Protocol):
    """A branch that works token by token and chooses for each `real` token which of its parts, such as experts, run.
    lossless: what one token gets does not depend on the other tokens."""

    def choose(self, x: Float[Array, "B k D"], real: Bool[Array, "B k"], *, lossless: bool) -> Update: ...


def update_by_token(branch: Any, x: Float[Array, "B k D"], real: Bool[Array, "B k"], lossless: bool) -> Update:
    """The update of tokens by a branch that works token by token, in the shape and dtype that the branch reads."""
    if isinstance(branch, Choosing):
        return branch.choose(x, real, lossless=lossless)
    return Update(fitting(branch(x), x))


def update_of(branch: Any, x: Float[Array, "B T D"], where: Where, cache: Any = None) -> tuple[Array, Any]:
    """The update of all tokens by a branch of any kind, and its cache. With a cache, new keys and values are written
    into it, and queries see all that it holds."""
    if isinstance(branch, InOrder):
        return branch.in_order(x, where, cache)
    if not isinstance(branch, Mixing):
        return fitting(branch(x), x), cache
    if cache is None:
        return between(branch, x, where, x, where), None
    fresh = branch.keys_values(x, where)
    cache = cache.write(fresh, where)
    return branch.mix(x, where, *cache.seen(fresh, where)), cache


_holds_a_branch = functools.partial(jax.tree_util.register_dataclass, data_fields=["branch"], meta_fields=["dtype"])


@_holds_a_branch
@dataclasses.dataclass(frozen=True)
class Narrow:
    """A branch that computes in `dtype` while the residual has another dtype: its input is rounded, its update
    widened."""

    branch: Any
    dtype: Any

    def __call__(self, x: Float[Array, "B T D"], *rest: Any) -> Any:
        found = self.branch(x.astype(self.dtype), *rest)
        return (found[0].astype(x.dtype), *found[1:]) if isinstance(found, tuple) else found.astype(x.dtype)


@_holds_a_branch
@dataclasses.dataclass(frozen=True)
class NarrowInOrder(Narrow):
    """`Narrow` for a branch in which tokens read those before them."""

    def in_order(self, x: Float[Array, "B T D"], where: Where, cache: Any) -> tuple[Float[Array, "B T D"], Any]:
        found, cache = self.branch.in_order(x.astype(self.dtype), where, cache)
        return found.astype(x.dtype), cache


@_holds_a_branch
@dataclasses.dataclass(frozen=True)
class NarrowMixing(Narrow):
    """`Narrow` for a branch in which tokens read each other; keys and values are in `dtype`."""

    def keys_values(self, x: Float[Array, "B S D"], where: Where) -> Any:
        return self.branch.keys_values(x.astype(self.dtype), where)

    def mix(self, x: Float[Array, "B k D"], where: Where, known: Any, seen: Where) -> Float[Array, "B k D"]:
        return self.branch.mix(x.astype(self.dtype), where, known, seen).astype(x.dtype)

    def between(
        self, x: Float[Array, "B k D"], where: Where, source: Float[Array, "B S D"], seen: Where
    ) -> Float[Array, "B k D"]:
        rounded = x.astype(self.dtype)
        other = rounded if source is x else source.astype(self.dtype)
        return between(self.branch, rounded, where, other, seen).astype(x.dtype)


@_holds_a_branch
@dataclasses.dataclass(frozen=True)
class NarrowChoosing(Narrow):
    """`Narrow` for a branch that chooses among its parts."""

    def choose(self, x: Float[Array, "B k D"], real: Bool[Array, "B k"], *, lossless: bool) -> Update:
        found = self.branch.choose(x.astype(self.dtype), real, lossless=lossless)
        return found._replace(value=found.value.astype(x.dtype))


def narrowed(branch: Any, dtype: DTypeLike, stream: DTypeLike) -> Any:
    """Wraps the branch to compute in `dtype` for a residual stream of dtype `stream`; returns it as it is if both are
    the same."""
    if stream == dtype:
        return branch
    kinds = (InOrder, NarrowInOrder), (Mixing, NarrowMixing), (Choosing, NarrowChoosing)
    kind = next((narrow for protocol, narrow in kinds if isinstance(branch, protocol)), Narrow)
    return kind(branch, dtype)
