"""The two branches as XLA:CPU runs them fastest, each with its own backward pass.

Why this exists: XLA:CPU turns every matmul into a library call and everything between two matmuls into loops. A loop
whose result two others read is repeated in both, with its exponentials; an operand whose memory layout the library does
not take is transposed by a copy; and what the backward pass needs is copied into and out of arrays stacked over depth.
Here each exponential is computed once per pass, the head axis comes first from the first loop on, and the forward pass
saves only what the gradient cannot do without, short of computing an exponential again.

Numerics: those of the formulas in `mlp` and `attend`: softmax and statistics in float32, all else in the dtype of x. A
weight's gradient is summed in the dtype of x, as autodiff does.

Backend: a CPU without a mesh (`nagjax.layers.platform`); other compilers fuse these loops themselves.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.placement import alike

once = jax.lax.optimization_barrier  # the value is computed once, however many operations read it
FEW = 256  # rows of x for which to copy weights side by side costs more than one matmul saves
FEW_TRAINED = 64  # the limit where a backward pass follows, which needs the copy, too


def _matmul(x: Float[Array, "B T m"], weight: Float[Array, "m n"]) -> Float[Array, "B T n"]:
    return jax.lax.dot_general(x, weight, (((2,), (0,)), ((), ())))


def _matmul_with_all(x: Float[Array, "B T m"], weights, few: int) -> Float[Array, "B T n"]:
    """`x W` for all weights, side by side: one matmul with the joined weights, or, for fewer than `few` rows as in
    sampling, one matmul for each."""
    if math.prod(x.shape[:-1]) < few:
        return _joined([_matmul(x, weight) for weight in weights])
    return _matmul(x, _joined(weights))


def _back(dy: Float[Array, "B T n"], weight: Float[Array, "m n"]) -> Float[Array, "B T m"]:
    return jax.lax.dot_general(dy, weight, (((2,), (1,)), ((), ())))


def _weight_gradient(x: Float[Array, "B T m"], dy: Float[Array, "B T n"]) -> Float[Array, "m n"]:
    flat = lambda rows: rows.reshape(-1, rows.shape[-1])  # noqa: E731
    return jax.lax.dot_general(flat(x), flat(dy), (((0,), (0,)), ((), ())))


def matmuls(x: Float[Array, "B T m"], *weights: Float[Array, "m _"]) -> tuple[Float[Array, "B T _"], ...]:
    """`x W` for each of the weights, in x's dtype. If x has many rows, this is one matmul with all weights."""
    return _matmuls(*alike((x, *weights)))


@jax.custom_vjp
def _matmuls(x, *weights):
    return _parts(_matmul_with_all(x, weights, FEW), weights)


def _matmuls_forward(x, *weights):
    return _parts(_matmul_with_all(x, weights, FEW_TRAINED), weights), (x, weights)


def _matmuls_backward(kept, d_parts):
    x, weights = kept
    d = _joined(once(d_parts))
    return _back(d, _joined(weights)), *_parts(_weight_gradient(x, d), weights)


_matmuls.defvjp(_matmuls_forward, _matmuls_backward)


def _joined(arrays):
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)


def _parts(joined, weights) -> tuple[Array, ...]:
    return tuple(jnp.split(joined, list(itertools.accumulate(w.shape[-1] for w in weights))[:-1], axis=-1))


def swiglu(
    x: Float[Array, "B T D"],
    gate: Float[Array, "D F"],
    up: Float[Array, "D F"],
    down: Float[Array, "F D"],
    *others: Float[Array, "D _"],
) -> tuple[Float[Array, "B T _"], ...]:
    """`(silu(x W_gate) * (x W_up)) W_down`, and `x W` for each of the others. Saved for the backward pass: x and its
    product with all these weights."""
    return _swiglu_alike(*alike((x, gate, up, down, *others)))


@jax.custom_vjp
def _swiglu_alike(x, gate, up, down, *others):
    return _swiglu(x, gate, up, down, others, FEW)[0]


def _swiglu_forward(x, gate, up, down, *others):
    return _swiglu(x, gate, up, down, others, FEW_TRAINED)


def _swiglu(x, gate, up, down, others, few: int):
    every = once(_matmul_with_all(x, (gate, up, *others), few))
    a, b, *more = _parts(every, (gate, up, *others))
    return (_matmul(a * jax.nn.sigmoid(a) * b, down), *more), (x, every, gate, up, down, others)


def _swiglu_backward(kept, cotangents):
    (x, every, gate, up, down, others), (dy, *d_more) = kept, cotangents
    a, b, *_ = _parts(every, (gate, up, *others))
    share, d = once((jax.nn.sigmoid(a), _back(dy, down)))
    opened = a * share
    d_every = _joined(once((d * b * (share + opened * (1.0 - share)), d * opened, *d_more)))
    d_gate, d_up, *d_others = _parts(_weight_gradient(x, d_every), (gate, up, *others))
    return _back(d_every, _joined((gate, up, *others))), d_gate, d_up, _weight_gradient(opened * b, dy), *d_others


_swiglu_alike.defvjp(_swiglu_forward, _swiglu_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attention(
    q: Float[Array, "B H T Dh"],
    k: Float[Array, "B K S Dh"],
    v: Float[Array, "B K S Dh"],
    seen: Bool[Array, "B 1 T S"],
    by_key: Bool[Array, "B 1 S T"],
    bounded: bool,
    spans: int = 1,
) -> Float[Array, "B T H*Dh"]:
    """`softmax(q k^T where seen) v`, tokens first. q must be scaled already. by_key: `seen` with its last two axes
    swapped. bounded: promises that no product of a query and a key is so large that its exponential overflows; then the
    largest score of a row is not subtracted first. spans: the number of spans into which the queries are cut; each span
    is multiplied only with the keys up to its end, so more than 1 is valid only if no query sees a key further on in
    the row (T = S).

    Saved for the backward pass: the arguments except `seen`, the result, and for every row the logarithm of its sum of
    exponentials. The backward pass computes the exponentials again, which costs less than to write and read them, and
    has the keys as rows.
    """
    return _attention_forward(q, k, v, seen, by_key, bounded, spans)[0]


def spans_of(tokens: int) -> int:
    """The number of spans for a row's queries: 4, which leaves out 3/8 of the scores, if that saves time, else 1."""
    return 4 if tokens >= 512 and tokens % 4 == 0 else 1


def _spans(tokens: int, count: int) -> list[slice]:
    ends = [tokens * (i + 1) // count for i in range(count)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def by_head(a, b, over, dtype=None):
    """Product per head of two arrays [B, H, ...], summed over the axes `over`. dtype: of the result; None: that of the
    operands."""
    return jax.lax.dot_general(a, b, (over, ((0, 1), (0, 1))), preferred_element_type=dtype)


def _rows(q, keys: int):
    """Makes the queries of all heads that share a key rows of one head: [B, H, T, Dh] to [B, K, H/K*T, Dh]."""
    return q.reshape(q.shape[0], keys, -1, q.shape[-1])


def _with_mask(scores, seen, times):
    """Returns the scores, and the mask repeated for the heads that share a key. Both pass one optimization barrier, so
    that nothing depends on the mask alone: JAX would move this out of the scan over layers, as an array of the scores'
    size that every layer reads."""
    scores, seen = once((scores, seen))
    return scores, seen if set(times) == {1} else jnp.tile(seen, times)


def _attention_forward(q, k, v, seen, by_key, bounded, spans):
    if spans == 1:
        out, log_total = _mixed(q, k, v, seen, bounded)
        return out, (q, k, v, by_key, [log_total], out)
    parts = []
    for span in _spans(q.shape[2], spans):
        up_to = slice(span.stop)
        parts.append(_mixed(q[:, :, span], k[:, :, up_to], v[:, :, up_to], seen[:, :, span, up_to], bounded))
    out = jnp.concatenate([part for part, _ in parts], axis=1)
    return out, (q, k, v, by_key, [log_total for _, log_total in parts], out)


def _mixed(q, k, v, seen, bounded):
    """The result, and the logarithm of every row's sum of exponentials, [B, K, H/K*T]."""
    batch, heads, tokens, width = q.shape
    wide, keys = jnp.promote_types(q.dtype, jnp.float32), k.shape[1]
    scores, mask = _with_mask(by_head(_rows(q, keys), k, ((3,), (3,)), wide), seen, (1, 1, heads // keys, 1))
    if bounded:
        most = jnp.zeros((), wide)
    else:
        most = jnp.max(jnp.where(mask, scores, jnp.finfo(wide).min), axis=-1, keepdims=True)
    raised = once(jnp.where(mask, jnp.exp(scores - most), 0.0))
    total = jnp.sum(raised, axis=-1, keepdims=True)
    out = by_head(raised.astype(v.dtype), v, ((3,), (2,)), wide) / total
    out = out.astype(v.dtype).reshape(batch, heads, tokens, width).swapaxes(1, 2).reshape(batch, tokens, -1)
    return out, (jnp.log(total) + most)[..., 0]


def _attention_backward(bounded, spans, kept, d_out):
    q, k, v, by_key, log_totals, out = kept
    if spans == 1:
        return *_mixed_backward(q, k, v, by_key, log_totals[0], out, d_out), None, None
    dq, dk, dv = [], jnp.zeros_like(k), jnp.zeros_like(v)
    for span, log_total in zip(_spans(q.shape[2], spans), log_totals, strict=True):
        up_to = slice(span.stop)
        rows = by_key[:, :, up_to, span], log_total, out[:, span], d_out[:, span]
        own, d_keys, d_values = _mixed_backward(q[:, :, span], k[:, :, up_to], v[:, :, up_to], *rows)
        dq.append(own)
        dk, dv = dk.at[:, :, up_to].add(d_keys), dv.at[:, :, up_to].add(d_values)
    return jnp.concatenate(dq, axis=2), dk, dv, None, None


def _mixed_backward(q, k, v, by_key, log_total, out, d_out):
    wide, keys = log_total.dtype, k.shape[1]
    batch, heads, tokens, width = q.shape
    rows, split = _rows(q, keys), (batch, tokens, heads, width)
    d = once(_rows(d_out.reshape(split).swapaxes(1, 2), keys))
    along = jnp.sum(d_out.reshape(split).astype(wide) * out.reshape(split).astype(wide), axis=-1)
    along = along.swapaxes(1, 2).reshape(batch, keys, 1, -1)
    scores, mask = _with_mask(by_head(k, rows, ((3,), (3,)), wide), by_key, (1, 1, 1, heads // keys))
    shares = once(jnp.where(mask, jnp.exp(scores - log_total[:, :, None]), 0.0))
    d_scores = once((shares * (by_head(v, d, ((3,), (3,)), wide) - along)).astype(q.dtype))
    dk, dv = by_head(d_scores, rows, ((3,), (2,))), by_head(shares.astype(d.dtype), d, ((3,), (2,)))
    dq = by_head(once(k.swapaxes(2, 3)), d_scores, ((3,), (2,)))  # [B, K, Dh, rows]
    return dq.swapaxes(2, 3).reshape(q.shape), dk, dv


attention.defvjp(_attention_forward, _attention_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def placed(
    x: Float[Array, "B T H Dh"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    epsilon: float,
    scale: float,
) -> Float[Array, "B H T Dh"]:
    """`scale * rotary(x / rms(x))`, heads first. Saved for the backward pass: the result and the inverse RMS, not x."""
    return _placed_forward(x, cos, sin, epsilon, scale)[0]


def _placed_forward(x, cos, sin, epsilon, scale):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = once(jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1) + epsilon))
    y = _turn(wide * (scale * inverse)[..., None], cos[:, :, None], sin[:, :, None])
    y = once(y.astype(x.dtype)).swapaxes(1, 2)
    return y, (y, inverse, cos, sin)


def _placed_backward(epsilon, scale, kept, dy):
    """`dx = r (dn - n <dn n>)` with n = r x, r the inverse RMS and <> a mean. The rotation keeps the mean, <dn n> =
    <dy y>, and its inverse has -sin for sin."""
    y, inverse, cos, sin = kept
    dtype, wide = y.dtype, inverse.dtype
    y, dy = (rows.swapaxes(1, 2).astype(wide) for rows in (y, dy))
    along = once(jnp.mean(dy * y, axis=-1, keepdims=True))
    turned = _turn(scale * dy - (along / scale) * y, cos[:, :, None], -sin[:, :, None])
    return (turned * inverse[..., None]).astype(dtype), None, None


placed.defvjp(_placed_forward, _placed_backward)


def _turn(x, cos, sin):
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def is_bounded(head_width: int) -> bool:
    """Whether queries and keys of unit RMS have exponentials, and sums of them, that fit in float32."""
    return math.sqrt(head_width) < 60.0
