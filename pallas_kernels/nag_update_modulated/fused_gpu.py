"""What the one-pass GPU kernels of the modulated update share: their blocks, their refusals, XLA's part.

A program takes a block of rows, enough for a matrix unit to reuse the [D, C] weight over them. That is too much
for its registers, so it visits the block more than once, a chunk of columns at a time: once for the gate's
projection, then (its turn known) for the update. Main memory sees the first visit alone as long as the rows of
all programs at work stay in the second-level cache; `blocks` cuts them so.

The weight gradient, r^T dz, stays with XLA: it sums over all rows, which no program sees, and a [D, C] partial
sum per program would be as many bytes as the direction itself. The kernel writes dz, [N, C]. XLA's product is
one fixed program without atomic additions: an executable gives the same bits every time it runs on a device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.nag_update_modulated import modulator

MAX_GATES = 64
LEAST_ROWS, MOST_ROWS = 16, 64  # of a block: a matrix unit's height, and a multiple
# Of the direction, in one block. An H200 has 50 MB of second-level cache and 132 multiprocessors; with two
# programs on each, 128 KiB are 35 MB, and so are 256 KiB with one.
BLOCK_BYTES, MOST_BYTES = 2**17, 2**18
CHUNK_BYTES = 8192  # of a tensor, visited at once by WARPS warps: as much as ptxas compiles without spills
WARPS = 8
# Tensors a program returns to: the direction forward, all three inputs backward.
REVISITED = {"forward": 1, "backward": 3}


class Blocks(NamedTuple):
    """How `[N, D]` rows are cut: `rows` and `chunk` columns at a time, `gates` padded to a power of two."""

    rows: int
    chunk: int
    gates: int
    warps: int
    programs: int


def refusal(direction, log_norm, update, weight, bias, logits, beta, alpha) -> str | None:
    width, gates = weight.shape
    if gates > MAX_GATES:
        return f"C = {gates}; accepted: up to {MAX_GATES} gates"
    if direction.dtype != update.dtype or direction.dtype not in (jnp.bfloat16, jnp.float32):
        return f"{direction.dtype.name} and {update.dtype.name} rows; accepted: both bfloat16 or both float32"
    size = jnp.dtype(direction.dtype).itemsize
    if LEAST_ROWS * width * size > MOST_BYTES:
        most = MOST_BYTES // (LEAST_ROWS * size)
        return f"D = {width}; accepted: up to {most}, {LEAST_ROWS} rows of every program have to stay in cache"
    return None


def blocks(n: int, width: int, gates: int, dtype: object, verb: str) -> Blocks:
    """All powers of two but `programs`."""
    size, rows = jnp.dtype(dtype).itemsize, MOST_ROWS
    while rows > LEAST_ROWS and (rows * width * size * REVISITED[verb] > BLOCK_BYTES or rows // 2 >= n):
        rows //= 2
    chunk = min(elements(dtype) // rows, max(pl.next_power_of_2(width), 16))
    warps = min(max(WARPS * rows * chunk // elements(dtype), 4), WARPS)
    return Blocks(rows, chunk, padded(gates), warps, pl.cdiv(n, rows))


def elements(dtype: object) -> int:
    """Of a tensor, that a program has on chip at a time."""
    return CHUNK_BYTES // jnp.dtype(dtype).itemsize


def halves(dtype: object) -> int:
    """Arrays of the rows' dtype that a float32 weight, or gradient, is the sum of."""
    return 2 if dtype == jnp.bfloat16 else 1


def padded(gates: int) -> int:
    return max(pl.next_power_of_2(gates), 32)


def parameters(weight, bias, logits, beta, alpha, dtype) -> tuple[jax.Array, ...]:
    """What the kernels read: the weight as `[H, D, C']`, one float32 or two bfloat16 halves; bias and softmax of
    the logits `[C']`; `[beta, alpha]`. A gate of padding has no share."""
    more = padded(bias.shape[0]) - bias.shape[0]
    parts = modulator.split(weight) if halves(dtype) == 2 else (weight,)
    wide = jnp.pad(jnp.stack(parts), ((0, 0), (0, 0), (0, more)))
    return wide, jnp.pad(bias, (0, more)), jnp.pad(jax.nn.softmax(logits), (0, more)), jnp.stack([beta, alpha])


def parameter_gradients(direction, dz, sums, logits) -> tuple[jax.Array, ...]:
    """Of weight, bias, logits, beta and alpha, from dz and the kernel's other sums, see `gradient_shapes`."""
    gates, (of_z, of_shares, of_settings) = logits.shape[0], sums
    if halves(direction.dtype) == 2:
        high, low = jnp.split(jnp.dot(direction.T, dz, preferred_element_type=jnp.float32), 2, axis=1)
        product = high + low
    else:
        product = jnp.dot(direction.T, dz, precision="highest")
    d_logits = modulator.through_softmax(jax.nn.softmax(logits), of_shares.sum(0)[:gates])
    d_beta, d_alpha = of_settings.sum(1)
    return product[:, :gates], of_z.sum(0)[:gates], d_logits, d_beta, d_alpha


def gradient_shapes(n: int, width: int, gates: int, dtype: object) -> list[jax.ShapeDtypeStruct]:
    """What the backward kernel writes after the gradients of direction and update: dz (for bfloat16 rows as two
    halves side by side), and the gradients of bias and shares summed per program, of beta and alpha per row."""
    cut = blocks(n, width, gates, dtype, "backward")
    partial = jax.ShapeDtypeStruct((cut.programs, cut.gates), jnp.float32)
    return [
        jax.ShapeDtypeStruct((n, halves(dtype) * cut.gates), dtype),
        partial,
        partial,
        jax.ShapeDtypeStruct((2, n), jnp.float32),
    ]


def expected_bytes_moved(n: int, width: int, gates: int, dtype: object, *, backward: bool = False) -> int:
    """Bytes of the kernel, every operand once. XLA's product for the weight gradient reads the direction once
    more."""
    wide, size = padded(gates), jnp.dtype(dtype).itemsize
    moved = 4 * wide * (width + 2) + 8
    if not backward:
        return moved + n * (3 * width * size + 3 * 4)
    programs = blocks(n, width, gates, dtype, "backward").programs
    return moved + n * (5 * width * size + 4 * wide + 4 * 4) + 2 * programs * wide * 4


def estimate(n: int, width: int, gates: int, dtype: object, *, backward: bool = False) -> pl.CostEstimate:
    """For `pl.pallas_call`."""
    products = 2 if backward else 1
    return pl.CostEstimate(
        flops=((35 if backward else 16) + 2 * products * gates) * n * width,
        transcendentals=(gates + 4) * n,
        bytes_accessed=expected_bytes_moved(n, width, gates, dtype, backward=backward),
    )
