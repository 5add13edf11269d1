"""`nag_update_rows` with the raw Triton kernels of `nag_update`; rows are taken and put by XLA."""

from __future__ import annotations

import functools

from pallas_kernels.nag_update import triton as update_step
from pallas_kernels.rows import flat
from pallas_kernels.rows.nag_update import composed

PLATFORMS = update_step.PLATFORMS

forward = functools.partial(composed.forward, update_step, flat)
backward = functools.partial(composed.backward, update_step, flat)


def refusal(direction, log_norm, update, turn, indices) -> str | None:
    return update_step.refusal(direction, log_norm, update, turn)
