"""A sublayer that runs on all tokens: read, branch, advance. Routing wraps it (`nagjax.mod.routed`)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from nagjax.residual.protocol import Boundary, Scheme, Stream


class Result(NamedTuple):
    """What a sublayer leaves behind. `gate` and `ran` are by token; `notes` by sequence, [B], float32: what routing did
    (see `nagjax.mod.routed`), empty without it. `cache` is the branch's."""

    stream: Stream
    cache: Any
    gate: Float[Array, "#B #T #D"]
    ran: Bool[Array, "B T"]
    notes: dict[str, Float[Array, "B ..."]]


def run(
    scheme: Scheme,
    stream: Stream,
    branch: Callable[[Float[Array, "B T D"]], tuple[Float[Array, "B T D"], Any]],
    at: Boundary,
    pin: Callable[[Array], Array] = lambda x: x,
) -> Result:
    """One sublayer. `branch` maps what it reads to its update and its cache (None without one).

    Updates are pinned: left to choose, XLA's partitioner (jax 0.11.2, CPU, mesh 2x2x2) keeps a branch's output split
    over `tensor` and then combines it wrongly with a gate, without a word.
    """
    x = scheme.read(stream)
    update, cache = branch(x)
    with jax.named_scope("residual"):
        after, gate = scheme.advance(stream, pin(update), at)
    return Result(after, cache, gate, jnp.ones(x.shape[:2], bool), {})


def following(entries: nnx.Module, last: nnx.Module) -> nnx.Module:
    """The entry that reads after each block, stacked: those of the blocks [L, ...] one further, and the head's."""
    leaves = zip(jax.tree.leaves(entries), jax.tree.leaves(last), strict=True)
    shifted = [jnp.concatenate([own[1:], end[None]]) for own, end in leaves]
    return jax.tree.unflatten(jax.tree.structure(entries), shifted)
