"""`nag_update_modulated` as one Mosaic kernel per direction: the gate's products are taken of the block on
chip.

Why this exists: forward reads 2 tensors and writes 1, backward reads 3 and writes 2, as the plain update; the
gate costs no pass of its own, and neither does its weight gradient.
Numerics: as the op. For bfloat16 rows the weight goes through the matrix unit as two bfloat16 halves.
Backend: blocks run in order, so that the float32 parameter gradients add up block by block in an output that
stays on chip: the order is fixed by the shapes. The weight travels as [C, D], whose rows fill the lanes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import interpreter
from pallas_kernels.nag_update import algebra, block
from pallas_kernels.nag_update import mosaic_tpu as plain
from pallas_kernels.nag_update_modulated import modulator
from pallas_kernels.nag_update_modulated.cost import estimate

PLATFORMS = ("tpu",)

MAX_GATES = 64


def refusal(direction, log_norm, update, weight, bias, logits, beta, alpha) -> str | None:
    width, gates = weight.shape
    if gates > MAX_GATES:
        return f"C = {gates}; accepted: up to {MAX_GATES} gates"
    if direction.dtype != update.dtype or direction.dtype not in (jnp.bfloat16, jnp.float32):
        return f"{direction.dtype.name} and {update.dtype.name} rows; accepted: both bfloat16 or both float32"
    least = plain.tile_rows(direction)
    need = least * plain.row_bytes(width, "backward", direction) + _weight_bytes(width, gates)
    if need > plain.VMEM_BYTES:
        allowed = plain.VMEM_BYTES >> 20
        return f"D = {width}, C = {gates}: {need >> 20} MiB of VMEM for one block and the weight, {allowed} allowed"
    return None


def forward(direction, log_norm, update, weight, bias, logits, beta, alpha):
    (out,), (turn,), () = _call(
        _forward, "forward", (direction, update), (), (weight, bias, logits, beta, alpha), scalars_out=1
    )
    return (out, algebra.grown(log_norm, turn), turn), ()


def backward(residuals, cotangents):
    direction, update, weight, bias, logits, beta, alpha = residuals
    g, ds, d_turn = cotangents
    (dr, du), _, (dw, dz, d_shares, d_beta, d_alpha) = _call(
        _backward, "backward", (direction, update, g), (ds, d_turn), (weight, bias, logits, beta, alpha)
    )
    d_logits = modulator.through_softmax(jax.nn.softmax(logits), d_shares[0])
    return dr, ds, du, dw.T, dz[0], d_logits, d_beta[0, 0], d_alpha[0, 0]


def _forward(rows, scalars, gate, outs, width):
    (r, u), (out, turn_out) = rows, outs
    turn = modulator.turn(gate.project(r), *gate.settings).turn
    out[...] = block.forward(r.astype(jnp.float32), u.astype(jnp.float32), turn, width).astype(out.dtype)
    turn_out[0] = plain.to_row(turn)


def _backward(rows, scalars, gate, outs, width):
    (r, u, g), (ds, d_turn) = rows, scalars
    dr_out, du_out, dw_out, *sum_outs = outs
    state = modulator.turn(gate.project(r), *gate.settings)
    exact = (x.astype(jnp.float32) for x in (r, u, g))
    dr, du, dt = block.backward(*exact, state.turn, width)
    dt = dt + algebra.log_lane_gradient(ds, state.turn) + d_turn
    parts = modulator.gradients(state, *gate.settings, dt)
    dr_out[...] = (dr + gate.back(parts.z)).astype(dr_out.dtype)
    du_out[...] = du.astype(du_out.dtype)

    @pl.when(pl.program_id(0) == 0)
    def _():
        for ref in (dw_out, *sum_outs):
            ref[...] = jnp.zeros_like(ref)

    dw_out[...] += gate.weight_gradient(parts.z, r)
    for ref, part in zip(sum_outs, parts, strict=True):
        ref[...] += jnp.sum(part, axis=0, keepdims=True)


class _Gate:
    """The modulator's parameters on chip: `halves` of the weight `[C, D]`, `settings` (p, beta, alpha),
    bias."""

    def __init__(self, halves, bias, shares, beta, alpha):
        self.halves, self.bias, self.settings = halves, bias, (shares, beta, alpha)

    def project(self, r):
        """`[R, D]` to `[R, C]`."""
        return sum(_dot(r, half, ((1,), (1,))) for half in self.halves) + self.bias

    def back(self, dz):
        """`[R, C]` to `[R, D]`, in the precision of the rows."""
        high = self.halves[0]
        return _dot(dz.astype(high.dtype), high, ((1,), (0,)))

    def weight_gradient(self, dz, r):
        """`[C, D]`."""
        parts = modulator.split(dz) if len(self.halves) == 2 else (dz,)
        return sum(_dot(part, r, ((0,), (0,))) for part in parts)


def _dot(a, b, contract):
    precision = "highest" if a.dtype == jnp.float32 else "default"
    return jax.lax.dot_general(a, b, (contract, ((), ())), precision, preferred_element_type=jnp.float32)


def _weight_bytes(width: int, gates: int) -> int:
    """Two buffers of the weight and of its gradient, float32 each."""
    return 4 * 4 * gates * -(-width // 128) * 128


def block_rows(n: int, width: int, gates: int, direction: str, dtype) -> int:
    like = jax.ShapeDtypeStruct((n, width), dtype)
    rows = plain.block_rows(n, width, direction, like)
    room = plain.VMEM_BYTES - _weight_bytes(width, gates)
    while rows > plain.tile_rows(like) and rows * plain.row_bytes(width, direction, like) > room:
        rows //= 2
    return rows


def _call(body, direction: str, rows, scalars, parameters, scalars_out: int = 0):
    """One pass. Gives the `[N, D]` results, the `[N]` ones, and the sums over rows."""
    weight, bias, logits, beta, alpha = parameters
    (n, width), dtype, gates = rows[0].shape, rows[0].dtype, bias.shape[0]
    size = block_rows(n, width, gates, direction, dtype)
    blocks = pl.cdiv(n, size)
    wide_out = 1 if direction == "forward" else 2
    halves = modulator.split(weight.T) if dtype == jnp.bfloat16 else (weight.T,)
    small = [x.reshape(1, -1) for x in (bias, jax.nn.softmax(logits), beta, alpha)]
    sums = [(gates, width), (1, gates), (1, gates), (1, 1), (1, 1)] if direction == "backward" else []

    def kernel(*refs):
        refs = list(refs)
        take = lambda count: [refs.pop(0) for _ in range(count)]  # noqa: E731
        inside = pl.program_id(0) * size + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) < n
        wide = [ref[...] for ref in take(len(rows))]
        if n % size:  # what lies beyond the last row must not reach the sums
            wide = [jnp.where(inside, x, jnp.zeros_like(x)) for x in wide]
        columns = [plain.to_column(ref[0]) for ref in take(len(scalars))]
        gate = _Gate([ref[...] for ref in take(len(halves))], *(ref[...] for ref in take(len(small))))
        body(wide, columns, gate, refs, width)

    def whole(shape):
        return pl.BlockSpec(shape, lambda i: (0, 0))

    row_spec = pl.BlockSpec((size, width), lambda i: (i, 0))
    scalar_spec = pl.BlockSpec((1, 1, size), lambda i: (i, 0, 0))
    results = pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=[row_spec] * len(rows) + [scalar_spec] * len(scalars) + [whole(x.shape) for x in (*halves, *small)],
        out_specs=[row_spec] * wide_out + [scalar_spec] * scalars_out + [whole(s) for s in sums],
        out_shape=[jax.ShapeDtypeStruct((n, width), dtype)] * wide_out
        + [jax.ShapeDtypeStruct((blocks, 1, size), jnp.float32)] * scalars_out
        + [jax.ShapeDtypeStruct(s, jnp.float32) for s in sums],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=estimate(n, width, gates, dtype, backward=direction == "backward"),
        interpret=interpreter(),
        name=f"nag_update_modulated_{direction}",
    )(*rows, *(plain.blocked(s, blocks, size) for s in scalars), *halves, *small)
    flat = [x.reshape(-1)[:n] for x in results[wide_out : wide_out + scalars_out]]
    return results[:wide_out], flat, tuple(results[wide_out + scalars_out :])
