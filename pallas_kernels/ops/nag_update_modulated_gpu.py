"""The kernels of `nag_update_modulated` on a GPU: gate and update in one kernel, forward and backward.

Forward reads 2 tensors and writes 1, backward reads 3 and writes 2. A program takes a block with enough rows for a
matrix unit to reuse the [D, C] weight. That is too much for its registers, so it visits the block more than once, one
chunk of columns at a time: once for the gate's projection, then, with the turn known, for the update. Only the first
visit reads main memory, as long as the rows of all running programs stay in the second-level cache; `blocks` chooses
sizes for that (in the backward pass the widest rows exceed it).

XLA computes the weight gradient, r^T dz: it is a sum over all rows, which no program sees, and a [D, C] partial sum per
program would have as many bytes as the direction itself. The kernel writes dz, [N, C]; XLA's product reads the
direction once more. It is one fixed program without atomic additions: an executable gives the same bits every time it
runs on a device.

Numerics: rows are converted to float32 on chip, and each output is rounded once. For bfloat16 rows the matrix unit
takes the weight as two bfloat16 halves, and the gate's part of the direction's gradient as one.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import Implementation
from pallas_kernels.launch import Block, gpu, raw_triton
from pallas_kernels.launch.gpu import Tile
from pallas_kernels.ops import modulator
from pallas_kernels.ops import nag_update as plain
from pallas_kernels.ops.modulator import dot_on_chip

MAX_GATES = 64
LEAST_ROWS, MOST_ROWS = 16, 64  # rows of a block: the height of a matrix unit, and a multiple of it
# Most bytes that a block reads again, and most of the direction in the smallest block. An H200 has 50 MB of L2 cache
# and 132 multiprocessors; with two programs on each, 128 KiB per block make 35 MB, and so do 256 KiB with one.
BLOCK_BYTES, MOST_BYTES = 2**17, 2**18
CHUNK_BYTES = 8192  # bytes of a tensor per chunk, for WARPS warps: as much as ptxas compiles without spills
WARPS = 8
# Tensors that a program reads again: the direction in the forward pass, all three inputs in the backward pass.
REVISITED = {"forward": 1, "backward": 3}


class Blocks(NamedTuple):
    """How `[N, D]` rows are cut into blocks of `rows` rows and chunks of `chunk` columns, with `gates` padded to a
    power of two. `group` whole rows are updated at a time."""

    n: int
    width: int
    rows: int
    chunk: int
    gates: int
    group: int
    warps: int

    @property
    def programs(self) -> int:
        return pl.cdiv(self.n, self.rows)


def blocks(n: int, width: int, gates: int, dtype: object, verb: str) -> Blocks:
    """The block sizes, all powers of two."""
    size, rows = jnp.dtype(dtype).itemsize, MOST_ROWS
    elements, columns = CHUNK_BYTES // size, pl.next_power_of_2(width)
    while rows > LEAST_ROWS and (rows * width * size * REVISITED[verb] > BLOCK_BYTES or rows // 2 >= n):
        rows //= 2
    chunk = min(elements // rows, max(columns, 16))
    warps = min(max(WARPS * rows * chunk // elements, 4), WARPS)
    return Blocks(n, width, rows, chunk, padded(gates), min(max(elements // columns, 1), rows), warps)


def padded(gates: int) -> int:
    return max(pl.next_power_of_2(gates), 32)


def halves(dtype: object) -> int:
    """The number of arrays in the rows' dtype whose sum represents a float32 weight or gradient."""
    return 2 if dtype == jnp.bfloat16 else 1


def refuse_rows_and_gates(direction, update, weight) -> str | None:
    if weight.shape[1] > MAX_GATES:
        return f"C = {weight.shape[1]}; accepted: up to {MAX_GATES} gates"
    if direction.dtype != update.dtype or direction.dtype not in (jnp.bfloat16, jnp.float32):
        return f"{direction.dtype.name} and {update.dtype.name} rows; accepted: both bfloat16 or both float32"
    return None


def refusal(direction, log_norm, update, weight, *others) -> str | None:
    if why := refuse_rows_and_gates(direction, update, weight):
        return why
    size, width = jnp.dtype(direction.dtype).itemsize, weight.shape[0]
    if LEAST_ROWS * width * size > MOST_BYTES:
        most = MOST_BYTES // (LEAST_ROWS * size)
        return f"D = {width}; accepted: up to {most}, {LEAST_ROWS} rows of every program have to stay in cache"
    return None


def bytes_moved(n: int, width: int, dtype: object, gates: int, *, backward: bool = False) -> int:
    """Bytes that the kernel moves, with every operand counted once. XLA's weight gradient reads the direction again."""
    wide, size = padded(gates), jnp.dtype(dtype).itemsize
    moved = 4 * wide * (width + 2) + 8
    if not backward:
        return moved + n * (3 * width * size + 3 * 4)
    programs = blocks(n, width, gates, dtype, "backward").programs
    return moved + n * (5 * width * size + 4 * wide + 4 * 4) + 2 * programs * wide * 4


def estimate(moved: int, n: int, width: int, gates: int, matmuls: int) -> pl.CostEstimate:
    """The cost estimate for `pl.pallas_call`, with this number of matmuls of rows and weight."""
    flops = (16 if matmuls == 1 else 35) + 2 * matmuls * gates
    return pl.CostEstimate(flops=flops * n * width, transcendentals=(gates + 4) * n, bytes_accessed=moved)


def by(call: Callable, launcher: ModuleType) -> Implementation:
    """The implementation whose kernels are started by `call(cut, gates, verb, inputs, like)`."""
    ways = functools.partial(forward, call), functools.partial(backward, call)
    return Implementation(*ways, launcher.PLATFORMS, refusal, launcher.unavailable, bytes_moved)


def forward(call, direction, log_norm, update, *parameters):
    gates = parameters[1].shape[0]
    cut = blocks(*direction.shape, gates, direction.dtype, "forward")
    inputs = direction, log_norm, update, *_on_chip(*parameters, direction.dtype)
    return tuple(call(cut, gates, "forward", inputs, (direction, log_norm, log_norm))), ()


def backward(call, residuals, cotangents):
    (direction, update, *parameters), dtype, logits = residuals, residuals[0].dtype, residuals[4]
    gates, (g, ds, d_turn) = logits.shape[0], cotangents
    cut = blocks(*direction.shape, gates, dtype, "backward")
    partial = jax.ShapeDtypeStruct((cut.programs, cut.gates), jnp.float32)
    like = [  # after two tensors dz (for bfloat16 rows as two halves side by side), then the gradients of bias and
        # shares summed per program, and those of beta and alpha per row
        direction,
        update,
        jax.ShapeDtypeStruct((cut.n, halves(dtype) * cut.gates), dtype),
        partial,
        partial,
        jax.ShapeDtypeStruct((2, cut.n), jnp.float32),
    ]
    inputs = direction, update, g, ds, d_turn, *_on_chip(*parameters, dtype)
    dr, du, dz, of_z, of_shares, of_settings = call(cut, gates, "backward", inputs, like)
    product = modulator.product_of_halves if halves(dtype) == 2 else modulator.product
    d_logits = modulator.through_softmax(jax.nn.softmax(logits), of_shares.sum(0)[:gates])
    return dr, ds, du, product(direction.T, dz)[:, :gates], of_z.sum(0)[:gates], d_logits, *of_settings.sum(1)


def _on_chip(weight, bias, logits, beta, alpha, dtype) -> tuple[jax.Array, ...]:
    """The parameters as the kernels read them: the weight as `[H, D, C']`, one float32 or two bfloat16 halves; bias and
    softmax of the logits `[C']`; `[beta, alpha]`. The share of padded gates is zero."""
    more = padded(bias.shape[0]) - bias.shape[0]
    parts = modulator.split(weight) if halves(dtype) == 2 else (weight,)
    wide = jnp.pad(jnp.stack(parts), ((0, 0), (0, 0), (0, more)))
    return wide, jnp.pad(bias, (0, more)), jnp.pad(jax.nn.softmax(logits), (0, more)), jnp.stack([beta, alpha])


def raw_call(cut: Blocks, gates: int, verb: str, inputs: Sequence[jax.Array], like: Sequence[jax.Array]):
    """Calls the kernels in `triton/nag_update_modulated.py`."""
    name, constants = "nag_update_modulated", dict(N=cut.n, D=cut.width, ROWS=cut.rows, CHUNK=cut.chunk)
    constants |= dict(GATES=cut.gates, HALVES=halves(inputs[0].dtype))
    if verb == "forward":
        constants |= dict(GROUP=cut.group, COLUMNS=pl.next_power_of_2(cut.width))
    kernel, launched = getattr(raw_triton.kernels(name), verb), dict(grid=cut.programs, warps=cut.warps)
    return raw_triton.call(kernel, inputs, like, f"{name}_{verb}", **launched, **constants)


def pallas_call(cut: Blocks, gates: int, verb: str, inputs: Sequence[jax.Array], like: Sequence[jax.Array]):
    """Calls the Pallas kernels below."""
    (n, width), dtype = inputs[0].shape, inputs[0].dtype
    moved = bytes_moved(n, width, dtype, gates, backward=verb == "backward")
    cost = estimate(moved, n, width, gates, 1 if verb == "forward" else 2)
    kernel = functools.partial(_forward_kernel if verb == "forward" else _backward_kernel, cut, dtype)
    launched = dict(grid=cut.programs, warps=cut.warps, cost=cost, name=f"nag_update_modulated_{verb}")
    return gpu.launch(kernel, inputs, like, **launched)


def _forward_kernel(cut: Blocks, dtype, r, s, u, *refs):
    n, width, columns = cut.n, cut.width, pl.next_power_of_2(cut.width)
    gate, (out, s_out, t_out) = _Gate(cut, *refs[:4]), refs[4:]
    tile = _rows(cut)
    turn = modulator.turn(gate.project(tile, r), *gate.settings).turn
    start = pl.program_id(0) * cut.rows
    tile.store(s_out, plain.grown(tile.load(s), turn[:, 0]))
    tile.store(t_out, turn[:, 0])

    def update_group(i, carry):
        some = i * cut.group + jnp.arange(cut.group)
        row = start + some
        mine = jnp.sum(jnp.where(jnp.arange(cut.rows)[:, None] == some[None], turn, 0.0), axis=0)
        whole = Tile(row, row < n, jnp.arange(columns), width)
        block = Block(width, dtype, whole.inside)
        whole.store(out, plain.block_forward(block, whole.load(r), whole.load(u), mine[:, None]))
        return carry

    jax.lax.fori_loop(0, cut.rows // cut.group, update_group, 0)


def _backward_kernel(cut: Blocks, dtype, r, u, g, ds, d_turn, *refs):
    width, steps = cut.width, pl.cdiv(cut.width, cut.chunk)
    gate, outs = _Gate(cut, *refs[:4]), refs[4:]
    tile = _rows(cut)
    # Sums of u itself would cancel if its mean is large, so u is shifted by the mean of one part.
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
        at, rows, shifted, cotangent = chunk(steps - 1 - j)  # in reverse: the last chunks are still in cache
        w = orthogonal(at, rows, shifted)
        terms = rows * rows, w * rows, w * w, cotangent * w
        return tuple(s + _sum(x) for s, x in zip(sums, terms, strict=True))

    rr, wr, q, gw = (x / width for x in jax.lax.fori_loop(0, steps, second, (none,) * 4))
    turned = plain.turned(rr, wr, q, state.turn)
    on = plain.gradients(turned, a, mean_r, rr, state.turn, mean_g, gr, gw, width)
    lane = plain.log_lane_gradient(tile.load(ds)[:, None], state.turn)
    parts = modulator.gradients(state, *gate.settings, on.dt + lane + tile.load(d_turn)[:, None])
    dr_out, du_out, *gate_outs = outs
    pull = _store_gate(cut, tile, parts, *gate_outs)

    def third(j, carry):
        at, rows, shifted, cotangent = chunk(j)
        w = orthogonal(at, rows, shifted)
        at.store(dr_out, on.r_g * cotangent + on.r_r * rows + on.r_w * w + gate.back(pull, at))
        at.store(du_out, on.u_g * cotangent + on.u_r * rows + on.u_w * w + on.u_1)
        return carry

    jax.lax.fori_loop(0, steps, third, 0)


def _rows(cut: Blocks) -> Tile:
    row = pl.program_id(0) * cut.rows + jnp.arange(cut.rows)
    return Tile(row, row < cut.n, jnp.arange(cut.chunk), cut.width)


def _store_gate(cut, tile: Tile, parts: modulator.GateGradients, dz_out, z_out, shares_out, settings_out):
    """Writes the gate's gradients and returns dz in the precision of the rows."""
    column = jnp.arange(cut.gates)
    pieces = modulator.split_on_chip(parts.z) if dz_out.dtype == jnp.bfloat16 else (parts.z,)
    for half, piece in enumerate(pieces):
        place = tile.row[:, None], half * cut.gates + column[None]
        gpu.store(dz_out.at[place], piece, mask=tile.valid[:, None])
    for ref, value in (z_out, parts.z), (shares_out, parts.shares):
        gpu.store(ref.at[pl.program_id(0), column], jnp.sum(value, axis=0))
    for i, value in enumerate((parts.beta, parts.alpha)):
        gpu.store(settings_out.at[i, tile.row], value[:, 0], mask=tile.valid)
    return pieces[0]


class _Gate:
    """The modulator's parameters: the weight in memory, the rest on chip."""

    def __init__(self, cut: Blocks, weight, bias, shares, settings):
        gate = jnp.arange(cut.gates)
        self.cut, self.weight = cut, weight
        self.bias = gpu.load(bias.at[gate])[None]
        self.settings = gpu.load(shares.at[gate])[None], settings[0], settings[1]

    def project(self, tile: Tile, r):
        """The projection of the tile's rows `[R, D]`, `[R, C]`."""

        def step(j, z):
            return self.add(z, tile._replace(column=j * self.cut.chunk + jnp.arange(self.cut.chunk)), r)

        start = jnp.zeros((self.cut.rows, self.cut.gates), jnp.float32)
        return jax.lax.fori_loop(0, pl.cdiv(self.cut.width, self.cut.chunk), step, start) + self.bias

    def add(self, z, at: Tile, r):
        """`z` plus the part of the projection from these columns."""
        rows = at.load(r, self.weight.dtype)
        return sum((dot_on_chip(rows, half, (1, 0)) for half in self._halves(at)), z)

    def back(self, dz, at: Tile):
        """dz W^T, `[R, C]` to `[R, D]`, for these columns only."""
        return dot_on_chip(dz, self._halves(at)[0], (1, 1))

    def _halves(self, at: Tile):
        place = at.column[:, None], jnp.arange(self.cut.gates)[None]
        mask = (at.column < self.cut.width)[:, None]
        return [gpu.load(self.weight.at[h, *place], mask=mask, other=0.0) for h in range(self.weight.shape[0])]


def _sum(x):
    return jnp.sum(x, axis=1, keepdims=True)
