"""`nag_update_modulated` on GPU for what `fused_gpu` refuses: the gate by XLA's matrix products, the update by
`nag_update.pallas_triton`; see `two_steps`."""

from __future__ import annotations

import functools

from pallas_kernels.nag_update import pallas_triton as update_step
from pallas_kernels.nag_update_modulated import two_steps

PLATFORMS = update_step.PLATFORMS

forward = functools.partial(two_steps.forward, update_step)
backward = functools.partial(two_steps.backward, update_step)


def refusal(direction, log_norm, update, weight, bias, logits, beta, alpha) -> str | None:
    return update_step.refusal(direction, log_norm, update, log_norm)
