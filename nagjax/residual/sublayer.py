"""Runs one sublayer on all tokens: read, branch, advance. `nagjax.mod.routed` runs a sublayer on some of the tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from nagjax.layers.branch import Update
from nagjax.layers.extra_columns import ExtraColumns, offering
from nagjax.residual.protocol import Boundary, Scheme, Stream, fitting_result


class Result(NamedTuple):
    """What a sublayer returns. `gate` and `ran` are per token. `notes` [B, ...], float32, says per sequence what
    routing did (see `nagjax.mod.routed`; empty without routing). `cache` and `experts` are the branch's own cache and
    notes."""

    stream: Stream
    cache: Any
    gate: Float[Array, "#B #T #D"]
    ran: Bool[Array, "B T"]
    notes: dict[str, Float[Array, "B ..."]]
    experts: dict[str, Float[Array, "B ..."]] = {}  # noqa: RUF012 (never changed)


def run(
    scheme: Scheme,
    stream: Stream,
    branch: Callable[[Float[Array, "B T D"]], Update],
    at: Boundary,
    pin: Callable[[Array], Array] = lambda x: x,
) -> Result:
    """Runs one sublayer. Tokens for which the branch ran nothing skip it. `pin` fixes the sharding of the update.
    Raises UserError if the scheme's `advance` returns anything but a matching stream and a gate.

    Without `pin`, XLA's partitioner (jax 0.11.2, CPU, mesh 2x2x2) keeps a branch's output split over `tensor` and then
    combines it wrongly with a gate, without an error.
    """
    x = scheme.read(stream)
    projection = scheme.projection(stream, at)
    extra = None if projection is None else ExtraColumns(*projection)
    with offering(extra):
        update = branch(x)
    if extra is not None:
        at = at._replace(projected=extra.product)
    with jax.named_scope("residual"):
        after, gate = fitting_result(scheme, stream, x.shape, scheme.advance(stream, pin(update.value), at))
        ran = jnp.ones(x.shape[:2], bool) if update.ran is None else update.ran
        if update.ran is not None:
            after, gate = jax.tree.map(kept(ran), after, scheme.skip(stream, at)), ran[..., None] * gate
    return Result(after, update.cache, gate, ran, {}, update.notes)


def kept(ran: Bool[Array, "B T"]) -> Callable[[Array, Array], Array]:
    """A function of two leaves that takes the first for the tokens that ran and the second for the others."""
    return lambda new, old: jnp.where(ran.reshape(*ran.shape, *(1,) * (new.ndim - 2)), new, old)


def following(entries: nnx.Module, last: nnx.Module) -> nnx.Module:
    """The `entry` of the reader after each block, stacked [L, ...]: the next block's, and the head's after the last
    block."""
    leaves = zip(jax.tree.leaves(entries), jax.tree.leaves(last), strict=True)
    shifted = [jnp.concatenate([own[1:], end[None]]) for own, end in leaves]
    return jax.tree.unflatten(jax.tree.structure(entries), shifted)
