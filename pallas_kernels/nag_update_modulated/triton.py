"""`nag_update_modulated` on GPU by raw Triton kernels: what stays when JAX drops Pallas-Triton.

Why this exists and numerics: as `pallas_triton`. Backend: jax_triton, extra `triton`; see `raw_triton`.
"""

from __future__ import annotations

import jax
from jax.experimental import pallas as pl

from pallas_kernels import raw_triton
from pallas_kernels.nag_update.triton import EPSILONS
from pallas_kernels.nag_update_modulated import fused_gpu

PLATFORMS = raw_triton.PLATFORMS

expected_bytes_moved = fused_gpu.expected_bytes_moved


def refusal(*inputs: jax.Array) -> str | None:
    return raw_triton.missing() or fused_gpu.refusal(*inputs)


def forward(direction, log_norm, update, *parameters):
    from pallas_kernels.nag_update_modulated import triton_kernels

    columns = pl.next_power_of_2(direction.shape[1])
    launch = _launch(direction, parameters, "forward")
    group = min(max(fused_gpu.elements(direction.dtype) // columns, 1), launch["ROWS"])
    inputs = direction, log_norm, update, *fused_gpu.parameters(*parameters, direction.dtype)
    like, name = (direction, log_norm, log_norm), "nag_update_modulated_forward"
    outs = raw_triton.call(triton_kernels.forward, inputs, like, name, GROUP=group, COLUMNS=columns, **launch)
    return tuple(outs), ()


def backward(residuals, cotangents):
    from pallas_kernels.nag_update_modulated import triton_kernels

    direction, update, *parameters = residuals
    (n, width), dtype, logits = direction.shape, direction.dtype, parameters[2]
    g, ds, d_turn = cotangents
    like = direction, update, *fused_gpu.gradient_shapes(n, width, logits.shape[0], dtype)
    inputs = direction, update, g, ds, d_turn, *fused_gpu.parameters(*parameters, dtype)
    launch = _launch(direction, parameters, "backward")
    outs = raw_triton.call(triton_kernels.backward, inputs, like, "nag_update_modulated_backward", **launch)
    dr, du, dz, *sums = outs
    return dr, ds, du, *fused_gpu.parameter_gradients(direction, dz, sums, logits)


def _launch(direction: jax.Array, parameters, verb: str) -> dict:
    (n, width), dtype = direction.shape, direction.dtype
    cut = fused_gpu.blocks(n, width, parameters[1].shape[0], dtype, verb)
    shape = dict(N=n, D=width, ROWS=cut.rows, CHUNK=cut.chunk, GATES=cut.gates, HALVES=fused_gpu.halves(dtype))
    return dict(grid=cut.programs, warps=cut.warps, **shape, **EPSILONS)
