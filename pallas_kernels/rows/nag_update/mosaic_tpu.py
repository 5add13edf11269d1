"""`nag_update_rows` on TPU: rows taken and put by DMA (32-bit) or by XLA (16-bit), updated by the Mosaic
kernel."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.nag_update import mosaic_tpu as update_step
from pallas_kernels.rows import copy_mosaic, flat
from pallas_kernels.rows.nag_update import composed

PLATFORMS = update_step.PLATFORMS


def refusal(direction, log_norm, update, turn, indices) -> str | None:
    return update_step.refusal(direction, log_norm, update, turn)


def forward(direction, *others):
    return composed.forward(update_step, _copies(direction), direction, *others)


def backward(residuals, cotangents):
    return composed.backward(update_step, _copies(cotangents[0]), residuals, cotangents)


def _copies(x: jnp.ndarray):
    return flat if copy_mosaic.refusal(x) else copy_mosaic
