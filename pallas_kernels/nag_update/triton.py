"""`nag_update` on GPU by raw Triton kernels: what stays when JAX drops Pallas-Triton.

Why this exists and numerics: as `pallas_triton`. Backend: jax_triton, extra `triton`; see `raw_triton`.
"""

from __future__ import annotations

from pallas_kernels import raw_triton
from pallas_kernels.nag_update.constants import EPS_NORM, EPS_UPDATE

PLATFORMS = raw_triton.PLATFORMS

EPSILONS = dict(EPS_UPDATE=EPS_UPDATE, EPS_NORM=EPS_NORM)


def refusal(direction, log_norm, update, turn) -> str | None:
    return raw_triton.refusal(direction=direction, update=update)


def forward(direction, log_norm, update, turn):
    from pallas_kernels.nag_update import triton_kernels

    inputs = direction, log_norm, update, turn
    like = direction, log_norm
    return tuple(raw_triton.launch(triton_kernels.forward, inputs, like, "nag_update_forward", **EPSILONS)), ()


def backward(residuals, cotangents):
    from pallas_kernels.nag_update import triton_kernels

    g, ds = cotangents
    inputs = *residuals, g, ds
    dr, du, dt = raw_triton.launch(triton_kernels.backward, inputs, residuals, "nag_update_backward", **EPSILONS)
    return dr, ds, du, dt
