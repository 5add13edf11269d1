"""The NAG residual update: normalise, rotate and rescale a row in one pass over memory.

Every output of the update and of its gradients is a sum of three rows with scalar factors: r, g = dr', and w, the part
of the update orthogonal to r; in du also of a constant. So an implementation needs a few row means and one elementwise
pass, and all implementations share the algebra below. Means and sums are taken of w itself: computed from the moments
of r and u they would cancel when an update is nearly parallel to its direction, and r' would lose its unit RMS.

With <x> the row mean, c = u - <u>, a = <c r>, w = c - a r, q = <w^2>, k = 1 / sqrt(q + eps), n = k w:
    y = r + t n                        r' = v y,  v = 1 / sqrt(<y^2> + eps)
    dy = v (g - r' <g r'>)             dt = <dy n> D + ds t / (1 + t^2)
    dw = k t (dy - n <dy n>)           dr = dy - a dw - <dw r> c
    dc = dw - <dw r> r                 du = dc - <dc>

If q is below eps, there is no direction to turn to, and k, up to 1e6, would multiply the gradient: one such row would
decide how a whole batch's gradient is clipped. Then dw = t dy, the gradient of an update that is added as it is.
Likewise dy = g if <y^2> is below eps: otherwise v would multiply the gradient of a row of zeros in every sublayer,
until it overflows.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.checks import check_dtype, check_float, check_shapes
from pallas_kernels.dispatch import ImplementationName, Op, run
from pallas_kernels.launch import Block, RowKernel, xla
from pallas_kernels.ops import by_rows

# Added to mean(u_perp^2) before its square root. An update of RMS 1e-5 still gets 99.5% of its rotation.
EPS_UPDATE = 1e-12
# Added to mean(y^2) of the rotated direction. It changes nothing for a unit direction (mean(y^2) >= 1); a row of zeros
# whose update is zero, such as padding, stays zero, and its gradient is the incoming one.
EPS_NORM = 1e-12


def nag_update(
    direction: Float[Array, "*N D"],
    log_norm: Float[Array, "*N"],
    update: Float[Array, "*N D"],
    turn: Float[Array, "*N"],
    *,
    implementation: ImplementationName = None,
) -> tuple[Float[Array, "*N D"], Float[Array, "*N"]]:
    """Rotate every row's direction towards its update by the angle arctan(turn), and increase its log-norm.

        c  = update - mean(update)              s' = s + log(1 + t^2) / 2
        w  = c - mean(c r) r
        n  = w / sqrt(mean(w^2) + 1e-12)
        y  = r + t n
        r' = y / sqrt(mean(y^2) + 1e-12)

    NAG, arXiv:2606.16112, equations 10-17, except that r' is divided by the measured RMS of y and not by the
    predicted sqrt(1 + t^2), with which the norm drifts in bfloat16; the log-norm takes the predicted growth.

    Why this exists: the stream is already the next branch's normalised input, so all that happens between two
    branches is this one pass: forward reads 2 and writes 1 tensor of [N, D]; backward reads 3 (direction, update
    and a gradient; nothing else is saved, but four numbers a row where XLA alone may run) and writes 2.
    Numerics: statistics and arithmetic in float32, each output rounded once. An update without a part
    orthogonal to the direction (zero, constant over features, or parallel) does not change the direction, and
    the log-norm still grows by the predicted log(1 + t^2) / 2; its gradient is that of an update that is added
    without being normalised, so that a branch that starts at zero can learn. Rounding errors of the mean count as
    an orthogonal part unless they are small compared with the formula's 1e-6. Updates are exact up to an RMS of
    1e17. A row of zeros whose update is zero stays zero, and its gradient is the incoming one.
    Backend: see `pallas_kernels.dispatch`; XLA on CPU.

    Args:
      direction: rows of RMS 1, any float dtype.
      log_norm: natural logarithm of each row's norm over sqrt(D), float32.
      update: the branch's output, any float dtype; its mean over features is removed here.
      turn: tangent of each row's rotation angle, float32.
      implementation: None for the best on the platform, a name, or names to try in order.

    Returns:
      New direction (dtype of `direction`) and log-norm (float32).

    Raises:
      ValueError: shapes that do not match, a wrong dtype, or no implementation that accepts them.
    """
    check_shapes(
        "nag_update",
        {
            "direction": (direction, ("...", "D")),
            "log_norm": (log_norm, ("...",)),
            "update": (update, ("...", "D")),
            "turn": (turn, ("...",)),
        },
    )
    check_float("nag_update", direction=direction, update=update)
    check_dtype("nag_update", "float32", direction, update, log_norm=log_norm, turn=turn)
    return run(OP, implementation, direction, log_norm, update, turn)


def reference(
    direction: Float[Array, "N D"], log_norm: Float[Array, " N"], update: Float[Array, "N D"], turn: Float[Array, " N"]
) -> tuple[Float[Array, "N D"], Float[Array, " N"]]:
    """One line per equation, differentiated by JAX in forward and reverse mode. Statistics in float32 (float64 if an
    input is float64)."""
    exact = jnp.promote_types(jnp.result_type(direction, update), jnp.float32)
    r, u = direction.astype(exact), update.astype(exact)
    t = turn[:, None]
    u = u - jnp.mean(u, -1, keepdims=True)
    u_perp = u - jnp.mean(u * r, -1, keepdims=True) * r
    y = unit_rms(r + t * unit_rms(u_perp, EPS_UPDATE), EPS_NORM)
    return y.astype(direction.dtype), log_norm + 0.5 * jnp.log1p(turn * turn)


def unit_rms(x: Float[Array, "... D"], epsilon: float) -> Float[Array, "... D"]:
    """`x / sqrt(mean(x^2) + epsilon)`. If mean(x^2) is below epsilon, its gradient is the incoming one; that of the
    formula would be up to 1 / sqrt(epsilon) times as large."""
    square = jnp.mean(x * x, -1, keepdims=True)
    unit = x * jax.lax.rsqrt(square + epsilon)
    return jnp.where(square > epsilon, unit, jax.lax.stop_gradient(unit - x) + x)


Row = Float[Array, "..."]


class Turned(NamedTuple):
    """The factors of r' = v r + on_w w, and what the backward pass needs."""

    v: Row
    on_w: Row
    k: Row
    rn: Row  # <r n>: zero up to rounding, for a unit direction
    nn: Row  # <n^2>: one, unless the update has no orthogonal part


def turned(rr: Row, wr: Row, q: Row, t: Row) -> Turned:
    """The factors, from rr = <r^2>, wr = <w r>, q = <w^2> and the turn."""
    k = jax.lax.rsqrt(q + EPS_UPDATE)
    rn, nn = k * wr, (k * q) * k
    v = jax.lax.rsqrt(rr + 2 * t * rn + t * t * nn + EPS_NORM)
    return Turned(v, v * t * k, k, rn, nn)


def grown(log_norm: Row, t: Row) -> Row:
    """The log-norm after the update."""
    return log_norm + 0.5 * jnp.log1p(t * t)


class Gradients(NamedTuple):
    """Factors of dr = r_g g + r_r r + r_w w and du = u_g g + u_r r + u_w w + u_1; and dt without the log-norm's
    part."""

    r_g: Row
    r_r: Row
    r_w: Row
    u_g: Row
    u_r: Row
    u_w: Row
    u_1: Row
    dt: Row


def gradients(state: Turned, a: Row, mr: Row, rr: Row, t: Row, mg: Row, gr: Row, gw: Row, d: int) -> Gradients:
    """The factors, from the forward scalars, a, mr = <r>, rr = <r^2>, the turn, and mg = <g>, gr = <g r>, gw = <g w> of
    the cotangent."""
    v, _, k, rn, nn = state
    kt, gn = k * t, k * gw
    still = v * v * EPS_NORM > 0.5  # <y^2> < eps
    pull = jnp.where(still, 0.0, v * v * (v * (gr + t * gn)))  # dy = v g - pull y
    v = jnp.where(still, 1.0, v)
    dy_n = v * gn - pull * (rn + t * nn)
    dy_r = v * gr - pull * (rr + t * rn)
    live = nn > 0.5  # q > eps
    gain, along = jnp.where(live, kt, t), jnp.where(live, dy_n, 0.0)
    dw_r = gain * (dy_r - rn * along)
    y_w = -pull * kt
    w_g, w_r, w_w = gain * v, -gain * pull, gain * (y_w - k * along)
    u_r = w_r - dw_r
    return Gradients(
        r_g=v - a * w_g,
        r_r=-pull - a * w_r - a * dw_r,
        r_w=y_w - a * w_w - dw_r,
        u_g=w_g,
        u_r=u_r,
        u_w=w_w,
        u_1=-(w_g * mg + (u_r - a * w_w) * mr),  # <w> = -a <r>
        dt=dy_n * d,
    )


def log_lane_gradient(ds: Row, t: Row) -> Row:
    """The part of dt that comes from the log-norm."""
    return ds * t / (1 + t * t)


def block_forward(block: Block, r, u, t) -> Array:
    """The new direction of a block of rows; turns are `[R, 1]`."""
    w, _, _, state = _turned_rows(block, r, u, t)
    return state.v * r + state.on_w * w


def block_backward(block: Block, r, u, g, t) -> tuple[Array, Array, Array]:
    """The gradients of direction, update and turn (without the log-norm's part)."""
    w, a, rr, state = _turned_rows(block, r, u, t)
    mr, mg, gr, gw = (block.mean(x) for x in (r, g, g * r, g * w))
    out = gradients(state, a, mr, rr, t, mg, gr, gw, block.width)
    dr = out.r_g * g + out.r_r * r + out.r_w * w
    du = out.u_g * g + out.u_r * r + out.u_w * w + out.u_1
    return dr, du, out.dt


def _turned_rows(block, r, u, t):
    c = u - block.mean(u)
    if block.inside is not None:
        c = jnp.where(block.inside, c, 0.0)
    a = block.mean(c * r)
    w = c - a * r
    rr, wr, q = (block.mean(x) for x in (r * r, w * r, w * w))
    return w, a, rr, turned(rr, wr, q, t)


def _forward_body(block, rows, scalars, vectors):
    return (block_forward(block, *rows, *scalars),), (), ()


def _backward_body(block, rows, scalars, vectors):
    dr, du, dt = block_backward(block, *rows, *scalars)
    return (dr, du), (dt,), ()


def forward_lane(scalars, computed):
    """The new log-norm, from log-norm and turn."""
    return (grown(*scalars),)


def backward_lane(scalars, computed):
    """The gradient of the turn, from the turn, the log-norm's gradient and the part that comes from the rows."""
    (t, ds), (dt,) = scalars, computed
    return (dt + log_lane_gradient(ds, t),)


SIZES = dict(scalars=2, scalar_outputs=1, per_thread=16, most_warps=16)
FORWARD = RowKernel("nag_update", "forward", _forward_body, rows=2, outputs=1, reads=(1,), lane=forward_lane, **SIZES)
BACKWARD = RowKernel(
    "nag_update", "backward", _backward_body, rows=3, outputs=2, reads=(0,), computes=1, lane=backward_lane, **SIZES
)


def _forward(rows_call, direction, log_norm, update, turn):
    outputs, lane, _ = rows_call(FORWARD, (direction, update), (log_norm, turn))
    return (*outputs, *lane), ()


def _backward(rows_call, residuals, cotangents):
    (direction, update, turn), (g, ds) = residuals, cotangents
    (dr, du), (dt,), _ = rows_call(BACKWARD, (direction, update, g), (turn, ds), like=(direction, update))
    return dr, ds, du, dt


# On a CPU the compiler makes a separate loop for each row mean, so their number decides the time. The forward pass
# needs four, as in the reference. If these are saved, the backward pass needs five instead of nine.


def _xla_forward(direction, log_norm, update, turn):
    r, u, t = _wide(direction, update, turn)
    shift = jnp.mean(u, -1, keepdims=True)
    a = jnp.mean((u - shift) * r, -1, keepdims=True)
    w = u - shift - a * r
    q = jnp.mean(w * w, -1, keepdims=True)
    y = r + t * jax.lax.rsqrt(q + EPS_UPDATE) * w
    v = jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPS_NORM)
    return ((v * y).astype(direction.dtype), grown(log_norm, turn)), tuple(x[:, 0] for x in (shift, a, q, v))


def _xla_backward(residuals, cotangents):
    direction, update, turn, *kept = residuals
    if not kept:
        return _backward(xla.rows_call, residuals, cotangents)
    (r, u, t), (g, ds) = _wide(direction, update, turn), cotangents
    g = g.astype(r.dtype)
    shift, a, q, v = (x[:, None] for x in kept)
    w = u - shift - a * r
    rr, mr, mg, gr, gw = (jnp.mean(x, -1, keepdims=True) for x in (r * r, r, g, g * r, g * w))
    k = jax.lax.rsqrt(q + EPS_UPDATE)
    state = Turned(v, v * t * k, k, k * a * (1 - rr), k * q * k)  # <w r> = a (1 - <r^2>)
    out = gradients(state, a, mr, rr, t, mg, gr, gw, r.shape[-1])
    dr = out.r_g * g + out.r_r * r + out.r_w * w
    du = out.u_g * g + out.u_r * r + out.u_w * w + out.u_1
    return dr, ds, du, out.dt[:, 0] + log_lane_gradient(ds, turn)


def _wide(direction, update, turn):
    exact = jnp.promote_types(jnp.result_type(direction, update), jnp.float32)
    return direction.astype(exact), update.astype(exact), turn[:, None]


IMPLEMENTATIONS = by_rows(_forward, _backward, FORWARD, BACKWARD)
IMPLEMENTATIONS["xla"] = dataclasses.replace(
    IMPLEMENTATIONS["xla"], forward=_xla_forward, backward=_xla_backward, keeps=(0, 0, 0, 0)
)

OP = Op(
    "nag_update",
    inputs=(1, 0, 1, 0),
    outputs=(1, 0),
    keep_inputs=(0, 2, 3),
    reference=reference,
    implementations=IMPLEMENTATIONS,
)
