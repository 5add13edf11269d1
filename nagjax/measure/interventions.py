"""Interventions: functions that run each block instead of the model (`intervene` of `Transformer.__call__`)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nagjax.errors import UserError
from nagjax.measure.damage import skip_effect
from nagjax.measure.gradients import tap
from nagjax.model.transformer import BlockCall, Intervention, Transformer
from nagjax.residual import Scheme, Stream
from nagjax.residual.sublayer import kept


def residual(scheme: Scheme, stream: Stream) -> Float[Array, "B T D"]:
    """The ordinary residual of any scheme, before the final norm, float32 [B, T, D]."""
    direction, log_rms = scheme.lanes(stream)
    return jnp.exp(log_rms)[..., None] * direction


def through(model: Transformer, stream: Stream, call: BlockCall) -> Stream:
    """The stream after the block."""
    return model.sublayers(stream, *call)[1].stream


def past(model: Transformer, stream: Stream, call: BlockCall) -> Stream:
    """The stream after a block that is left out: the same residual, prepared for the next reader."""
    return through(model, stream, call._replace(rates=(1.0, 1.0)))


def rebuilt(model: Transformer, h: Float[Array, "B T D"], call: BlockCall, *, behind: bool = False) -> Stream:
    """The stream before a block, or with `behind` after it, built from its residual. Raises UserError for a scheme
    whose stream holds more than the residual."""
    if not model.scheme.rebuilds:
        fix = "its stream is more than the residual and cannot be built from it: measure what needs no change of it"
        raise UserError("scheme", model.scheme.name, fix)
    layer = call.layer
    entry, reader = (layer.entry, layer.following[1]) if behind else (layer.block.attention.entry, layer.index[0])
    at = model.boundary(None, entry, 0, reader, call.ctx.progress)
    return model.scheme.rebuild(h.astype(model.config.stream_dtype), at, model.ends)


def without(stays: Bool[Array, " L"]) -> Intervention:
    """Leaves out the blocks for which `stays` is False, and gathers nothing."""

    def intervene(model, stream, call):
        run, skip = (lambda s: through(model, s, call)), (lambda s: past(model, s, call))
        return jax.lax.cond(stays[call.layer.block_index], run, skip, stream), ()

    return intervene


def tapped(meters: Float[Array, " L"]) -> Intervention:
    """Changes nothing. The gradient of `meters` [L] is `||dL/dh_l||^2` before every block. Raises UserError as
    `rebuilt` does."""

    def intervene(model, stream, call):
        h = tap(residual(model.scheme, stream), meters[call.layer.block_index])
        return through(model, rebuilt(model, h, call), call), ()

    return intervene


def erased(block: Int[Array, ""], counted: Float[Array, "B T"]) -> Intervention:
    """Replaces every token's residual before one block by the mean over the counted tokens (residual erasure, Csordas
    et al. 2025, arXiv:2505.13898). Raises UserError as `rebuilt` does."""

    def intervene(model, stream, call):
        h = residual(model.scheme, stream)
        mean = jnp.einsum("btd,bt->d", h, counted, precision="highest") / jnp.maximum(jnp.sum(counted), 1.0)
        blank = rebuilt(model, jnp.broadcast_to(mean, h.shape), call)
        here = call.layer.block_index == block
        stream = jax.tree.map(lambda a, b: jnp.where(here, a, b), blank, stream)
        return through(model, stream, call), ()

    return intervene


def of_rows(call: BlockCall, rows: slice | Int[Array, " b"]) -> BlockCall:
    """The arguments of the block for these rows of the batch alone."""
    return call._replace(ctx=call.ctx._replace(where=jax.tree.map(lambda x: x[rows], call.ctx.where)))


def _by_halves(step: Callable[..., Stream], model: Transformer, stream: Stream, call: BlockCall) -> Stream:
    """Applies `step` separately to each half of a batch that repeats its first half. A random router draws by a row's
    index, so it then lets in the same tokens in both halves."""
    batch = call.ctx.where.positions.shape[0] // 2
    own = of_rows(call, slice(batch))
    halves = (jax.tree.map(lambda x, rows=rows: x[rows], stream) for rows in (slice(batch), slice(batch, None)))
    return jax.tree.map(lambda *both: jnp.concatenate(both), *(step(model, half, own) for half in halves))


def skipping(block: Int[Array, ""], before: int | None = None, local: bool = False) -> Intervention:
    """Skips one block in the second half of a batch that repeats the first half. Gathers for each later block how much
    its update differs between the halves: `skip_effect` per token, [L, B, T].

    before: only tokens before this position skip the block, so that later positions show the effect on future tokens.
    local: each later block reads the whole model's residual minus the skipped block's update, so that its effect is the
    direct one, without those through other blocks. Raises UserError as `rebuilt` does.
    """

    def intervene(model, stream, call):
        scheme = model.scheme
        h = residual(scheme, stream)
        batch, tokens = h.shape[0] // 2, h.shape[1]
        second = (jnp.arange(2 * batch) >= batch)[:, None]
        skips = second if before is None else second & (jnp.arange(tokens) < before)
        place = call.layer.block_index
        run, skip = (_by_halves(step, model, stream, call) for step in (through, past))
        after = jax.tree.map(kept(skips & (place == block)), skip, run)
        changed = residual(scheme, after) - h
        effect = skip_effect(changed[:batch], changed[batch:])
        if local:
            missing = jnp.where(place == block, -changed[batch:] + changed[:batch], h[:batch] - h[batch:])
            whole = residual(scheme, after)[:batch]
            direct = rebuilt(model, jnp.concatenate([whole, whole - missing]), call, behind=True)
            after = jax.tree.map(lambda a, b: jnp.where(place >= block, a, b), direct, after)
        return after, effect

    return intervene
