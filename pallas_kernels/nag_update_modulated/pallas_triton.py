"""`nag_update_modulated` on GPU through Pallas-Triton: gate and update in one kernel, forward and backward.

Why this exists: forward reads 2 tensors and writes 1, backward reads 3 and writes 2; the gate adds no pass of its
own but for the weight gradient, which reads the direction once more. See `fused_gpu`.
Numerics: rows are widened to float32 on chip and rounded once on the way out. For bfloat16 rows the weight goes
through the matrix unit as two bfloat16 halves, and the gate's part of the direction's gradient as one.
Backend: JAX has announced the end of Pallas-Triton; `triton` holds the same kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import triton_tile
from pallas_kernels.dispatch import interpreter
from pallas_kernels.nag_update import algebra, block
from pallas_kernels.nag_update_modulated import fused_gpu, modulator
from pallas_kernels.triton_tile import Tile

PLATFORMS = triton_tile.PLATFORMS

refusal = fused_gpu.refusal
expected_bytes_moved = fused_gpu.expected_bytes_moved


def forward(direction, log_norm, update, weight, bias, logits, beta, alpha):
    (n, width), dtype, gates = direction.shape, direction.dtype, bias.shape[0]
    cut = fused_gpu.blocks(n, width, gates, dtype, "forward")
    columns = pl.next_power_of_2(width)
    group = min(max(fused_gpu.elements(dtype) // columns, 1), cut.rows)

    def kernel(r, s, u, *refs):
        gate, (out, s_out, t_out) = _Gate(cut, width, *refs[:4]), refs[4:]
        tile = _rows(cut, n, width)
        turn = modulator.turn(gate.project(tile, r), *gate.settings).turn
        start = pl.program_id(0) * cut.rows
        tile.store(s_out, algebra.grown(tile.load(s), turn[:, 0]))
        tile.store(t_out, turn[:, 0])

        def update_group(i, carry):
            some = i * group + jnp.arange(group)
            row = start + some
            mine = jnp.sum(jnp.where(jnp.arange(cut.rows)[:, None] == some[None], turn, 0.0), axis=0)
            whole = Tile(row, row < n, jnp.arange(columns), width)
            new = block.forward(whole.load(r), whole.load(u), mine[:, None], width, whole.inside)
            whole.store(out, new)
            return carry

        jax.lax.fori_loop(0, cut.rows // group, update_group, 0)

    inputs = direction, log_norm, update, *fused_gpu.parameters(weight, bias, logits, beta, alpha, dtype)
    like = direction, log_norm, log_norm
    return tuple(_call(kernel, cut, inputs, like, gates, "forward")), ()


def backward(residuals, cotangents):
    direction, update, weight, bias, logits, beta, alpha = residuals
    g, ds, d_turn = cotangents
    (n, width), dtype, gates = direction.shape, direction.dtype, bias.shape[0]
    cut = fused_gpu.blocks(n, width, gates, dtype, "backward")
    steps = pl.cdiv(width, cut.chunk)

    def kernel(r, u, g, ds, d_turn, *refs):
        gate, outs = _Gate(cut, width, *refs[:4]), refs[4:]
        tile = _rows(cut, n, width)
        # Sums of u itself would cancel where its mean is large: shifted by the mean of a part they do not.
        pivot = _sum(tile.load(u)) / min(cut.chunk, width)

        def chunk(j):
            at = tile._replace(column=j * cut.chunk + jnp.arange(cut.chunk))
            rows = at.load(r), jnp.where(at.inside, at.load(u) - pivot, 0.0), at.load(g)
            return at, *rows

        def first(j, sums):
            at, rows, shifted, cotangent = chunk(j)
            terms = shifted, rows, shifted * rows, cotangent, cotangent * rows
            z, *rest = sums
            return gate.add(z, at, r), *(s + _sum(x) for s, x in zip(rest, terms, strict=True))

        none = jnp.zeros((cut.rows, 1), jnp.float32)
        start = jnp.zeros((cut.rows, cut.gates), jnp.float32)
        z, *sums = jax.lax.fori_loop(0, steps, first, (start, *[none] * 5))
        mean_u, mean_r, ur, mean_g, gr = (x / width for x in sums)
        a = ur - mean_u * mean_r
        state = modulator.turn(z + gate.bias, *gate.settings)

        def orthogonal(at, rows, shifted):
            return jnp.where(at.inside, shifted - mean_u, 0.0) - a * rows

        def second(j, sums):
            at, rows, shifted, cotangent = chunk(steps - 1 - j)  # backwards: what was read last is in cache
            w = orthogonal(at, rows, shifted)
            terms = rows * rows, w * rows, w * w, cotangent * w
            return tuple(s + _sum(x) for s, x in zip(sums, terms, strict=True))

        rr, wr, q, gw = (x / width for x in jax.lax.fori_loop(0, steps, second, (none,) * 4))
        turned = algebra.turned(rr, wr, q, state.turn)
        on = algebra.gradients(turned, a, mean_r, rr, state.turn, mean_g, gr, gw, width)
        lane = algebra.log_lane_gradient(tile.load(ds)[:, None], state.turn)
        parts = modulator.gradients(state, *gate.settings, on.dt + lane + tile.load(d_turn)[:, None])
        dr_out, du_out, *gate_outs = outs
        pull = _store_gate(gate, tile, parts, *gate_outs)

        def third(j, carry):
            at, rows, shifted, cotangent = chunk(j)
            w = orthogonal(at, rows, shifted)
            at.store(dr_out, on.r_g * cotangent + on.r_r * rows + on.r_w * w + gate.back(pull, at))
            at.store(du_out, on.u_g * cotangent + on.u_r * rows + on.u_w * w + on.u_1)
            return carry

        jax.lax.fori_loop(0, steps, third, 0)

    parameters = fused_gpu.parameters(weight, bias, logits, beta, alpha, dtype)
    like = direction, update, *fused_gpu.gradient_shapes(n, width, gates, dtype)
    outs = _call(kernel, cut, (direction, update, g, ds, d_turn, *parameters), like, gates, "backward")
    dr, du, dz, *sums = outs
    return dr, ds, du, *fused_gpu.parameter_gradients(direction, dz, sums, logits)


def _rows(cut: fused_gpu.Blocks, n: int, width: int) -> Tile:
    row = pl.program_id(0) * cut.rows + jnp.arange(cut.rows)
    return Tile(row, row < n, jnp.arange(cut.chunk), width)


def _store_gate(gate: _Gate, tile: Tile, parts: modulator.GateGradients, dz_out, z_out, shares_out, settings_out):
    """Writes the gate's gradients; gives dz in the precision of the rows."""
    column = jnp.arange(gate.cut.gates)
    pieces = modulator.split(parts.z) if dz_out.dtype == jnp.bfloat16 else (parts.z,)
    for half, piece in enumerate(pieces):
        place = tile.row[:, None], half * gate.cut.gates + column[None]
        plgpu.store(dz_out.at[place], piece, mask=tile.valid[:, None])
    for ref, value in (z_out, parts.z), (shares_out, parts.shares):
        plgpu.store(ref.at[pl.program_id(0), column], jnp.sum(value, axis=0))
    for i, value in enumerate((parts.beta, parts.alpha)):
        plgpu.store(settings_out.at[i, tile.row], value[:, 0], mask=tile.valid)
    return pieces[0]


class _Gate:
    """The modulator's parameters: the weight in memory, the rest on chip."""

    def __init__(self, cut: fused_gpu.Blocks, width: int, weight, bias, shares, settings):
        gate = jnp.arange(cut.gates)
        self.cut, self.width, self.weight = cut, width, weight
        self.bias = plgpu.load(bias.at[gate])[None]
        self.settings = plgpu.load(shares.at[gate])[None], settings[0], settings[1]

    def project(self, tile: Tile, r):
        """`[R, D]` to `[R, C]`."""

        def step(j, z):
            return self.add(z, tile._replace(column=j * self.cut.chunk + jnp.arange(self.cut.chunk)), r)

        start = jnp.zeros((self.cut.rows, self.cut.gates), jnp.float32)
        return jax.lax.fori_loop(0, pl.cdiv(self.width, self.cut.chunk), step, start) + self.bias

    def add(self, z, at: Tile, r):
        """`z` and the part of the projection that these columns make."""
        rows = at.load(r, self.weight.dtype)
        return sum((_dot(rows, half, 0) for half in self._halves(at)), z)

    def back(self, dz, at: Tile):
        """`[R, C]` to these columns of `[R, D]`."""
        return _dot(dz, self._halves(at)[0], 1)

    def _halves(self, at: Tile):
        place = at.column[:, None], jnp.arange(self.cut.gates)[None]
        mask = (at.column < self.width)[:, None]
        return [plgpu.load(self.weight.at[h, *place], mask=mask, other=0.0) for h in range(self.weight.shape[0])]


def _sum(x):
    return jnp.sum(x, axis=1, keepdims=True)


def _dot(a, b, contract: int):
    precision = "highest" if a.dtype == jnp.float32 else "default"
    contracted = ((1,), (contract,)), ((), ())
    return jax.lax.dot_general(a, b, contracted, precision, preferred_element_type=jnp.float32)


def _call(kernel, cut: fused_gpu.Blocks, inputs, like, gates: int, verb: str):
    direction = inputs[0]
    return pl.pallas_call(
        kernel,
        grid=(cut.programs,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=1),
        cost_estimate=fused_gpu.estimate(*direction.shape, gates, direction.dtype, backward=verb == "backward"),
        interpret=interpreter(),
        name=f"nag_update_modulated_{verb}",
    )(*inputs)
