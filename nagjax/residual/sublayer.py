"""A sublayer that runs on all tokens: read, branch, advance. Routing wraps it (`nagjax.mod.routed`)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from nagjax.residual.protocol import Boundary, Scheme, Stream


class Result(NamedTuple):
    """What a sublayer returns. `gate` and `ran` are per token. `notes` [B], float32, says per sequence what routing did
    (see `nagjax.mod.routed`; empty without routing). `cache` is the branch's."""

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
    """Runs one sublayer. `branch` maps its input to its update and its cache (None without one).

    The sharding of updates is pinned. Otherwise XLA's partitioner (jax 0.11.2, CPU, mesh 2x2x2) keeps a branch's output
    split over `tensor` and then combines it wrongly with a gate, without an error.
    """
    x = scheme.read(stream)
    update, cache = branch(x)
    with jax.named_scope("residual"):
        after, gate = scheme.advance(stream, pin(update), at)
    return Result(after, cache, gate, jnp.ones(x.shape[:2], bool), {})


def following(entries: nnx.Module, last: nnx.Module) -> nnx.Module:
    """The `entry` of the reader after each block, stacked [L, ...]: the next block's, and the head's for the last."""
    leaves = zip(jax.tree.leaves(entries), jax.tree.leaves(last), strict=True)
    shifted = [jnp.concatenate([own[1:], end[None]]) for own, end in leaves]
    return jax.tree.unflatten(jax.tree.structure(entries), shifted)
