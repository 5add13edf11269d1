"""`nag_update_modulated` with the update by `nag_update.triton`; see `composed`."""

from __future__ import annotations

import functools

from pallas_kernels.nag_update import triton as update_step
from pallas_kernels.nag_update_modulated import composed

PLATFORMS = update_step.PLATFORMS

forward = functools.partial(composed.forward, update_step)
backward = functools.partial(composed.backward, update_step)


def refusal(direction, log_norm, update, weight, bias, logits, beta, alpha) -> str | None:
    return update_step.refusal(direction, log_norm, update, log_norm)
