"""Visitors of a forward pass: what takes the stream through a block in the model's place (`Transformer.__call__`)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nagjax.measure.damage import skip_effect
from nagjax.measure.gradients import tap
from nagjax.model.transformer import BlockCall, Intervention, Transformer
from nagjax.residual import Scheme, Stream


def residual(scheme: Scheme, stream: Stream) -> Float[Array, "B T D"]:
    """The ordinary residual of any scheme, float32: before the final norm."""
    direction, log_rms = scheme.lanes(stream)
    return jnp.exp(log_rms)[..., None] * direction


def through(model: Transformer, stream: Stream, call: BlockCall) -> Stream:
    """The stream behind the block."""
    return model.sublayers(stream, *call)[1].stream


def past(model: Transformer, stream: Stream, call: BlockCall) -> Stream:
    """The stream behind a block that was left out: the same residual, made ready for the next reader."""
    return through(model, stream, call._replace(rates=(1.0, 1.0)))


def rebuilt(model: Transformer, h: Float[Array, "B T D"], call: BlockCall) -> Stream:
    """The stream in front of a block, from its residual."""
    layer = call.layer
    at = model.boundary(None, layer.block.attention.entry, 0, layer.index[0], call.ctx.progress)
    return model.scheme.rebuild(h.astype(model.config.compute_dtype), at, model.ends)


def without(stays: Bool[Array, " L"]) -> Intervention:
    """Leaves blocks out; gathers nothing."""

    def intervene(model, stream, call):
        run, skip = (lambda s: through(model, s, call)), (lambda s: past(model, s, call))
        return jax.lax.cond(stays[call.layer.block_index], run, skip, stream), ()

    return intervene


def tapped(meters: Float[Array, " L"]) -> Intervention:
    """The pass as it is; the gradient of `meters` [L] is `||dL/dh_l||^2` in front of every block."""

    def intervene(model, stream, call):
        h = tap(residual(model.scheme, stream), meters[call.layer.block_index])
        return through(model, rebuilt(model, h, call), call), ()

    return intervene


def erased(block: Int[Array, ""], counted: Float[Array, "B T"]) -> Intervention:
    """Puts the mean residual of the counted tokens in every token's place in front of one block (residual erasure,
    Csordas et al. 2025, arXiv:2505.13898)."""

    def intervene(model, stream, call):
        h = residual(model.scheme, stream)
        mean = jnp.einsum("btd,bt->d", h, counted) / jnp.maximum(jnp.sum(counted), 1.0)
        blank = rebuilt(model, jnp.broadcast_to(mean, h.shape), call)
        here = call.layer.block_index == block
        stream = jax.tree.map(lambda a, b: jnp.where(here, a, b), blank, stream)
        return through(model, stream, call), ()

    return intervene


def skipping(block: Int[Array, ""], before: int | None = None, local: bool = False) -> Intervention:
    """For a batch whose second half repeats the first: the second half goes without one block. Gathers by later block
    how much its update changes, `skip_effect` by token [L, B, T], comparing the halves as they go.

    before: only tokens in front of this place of the row skip it, so that behind it the effect is one on the future.
    local: each later block is shown the whole model's residual less what the block left out had written, so that the
    effect is the direct one, not that through other blocks.
    """

    def intervene(model, stream, call):
        scheme = model.scheme
        h = residual(scheme, stream)
        batch, tokens = h.shape[0] // 2, h.shape[1]
        second = (jnp.arange(2 * batch) >= batch)[:, None]
        skips = second if before is None else second & (jnp.arange(tokens) < before)
        place = call.layer.block_index
        run, skip = through(model, stream, call), past(model, stream, call)
        after = jax.tree.map(lambda a, b: _where(skips & (place == block), a, b), skip, run)
        changed = residual(scheme, after) - h
        effect = skip_effect(changed[:batch], changed[batch:])
        if local:
            missing = jnp.where(place == block, -changed[batch:] + changed[:batch], h[:batch] - h[batch:])
            whole = residual(scheme, after)[:batch]
            direct = _behind(model, jnp.concatenate([whole, whole - missing]), call)
            after = jax.tree.map(lambda a, b: jnp.where(place >= block, a, b), direct, after)
        return after, effect

    return intervene


def _behind(model: Transformer, h: Float[Array, "B T D"], call: BlockCall) -> Stream:
    """The stream behind a block, from its residual."""
    layer = call.layer
    at = model.boundary(None, layer.entry, 0, layer.following[1], call.ctx.progress)
    return model.scheme.rebuild(h.astype(model.config.compute_dtype), at, model.ends)


def _where(mask: Bool[Array, "B #T"], a: Array, b: Array) -> Array:
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (a.ndim - 2)), a, b)
