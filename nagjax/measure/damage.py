"""What is lost without a block. `s` is the block left out, `l` a later one."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from nagjax.measure.norms import norm

LEAST = 1e-6  # length of an update below which changes are no longer counted relative to it


def skip_effect(update: Float[Array, "*n D"], changed: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """`||u - u'|| / max(||u||, 1e-6)`: how much a later block's update `u` changes when an earlier one is skipped
    (Csordas et al. 2025, arXiv:2505.13898, Section 3). They take the maximum over positions and prompts."""
    return norm(update - changed) / jnp.maximum(norm(update), LEAST)


def depth_score(effects: Float[np.ndarray, "L L"]) -> float:
    """`sum_s s e_s / sum_s e_s` with `e_s = mean_{l > s} effects[s, l]`, blocks counted from 1: higher where later
    computation builds on deep blocks (arXiv:2505.13898). The last block has no later one and does not count.

    Equal effects give L/2, whatever their size. NaN where nothing has any effect, and for fewer than two blocks.
    """
    effects = np.asarray(effects, np.float64)
    blocks = len(effects)
    own = np.array([effects[s, s + 1 :].mean() for s in range(blocks - 1)])
    return float(own @ np.arange(1, blocks) / own.sum()) if own.sum() > 0 else float("nan")


def contributing(damage: Float[np.ndarray, " L"]) -> float:
    """`(sum d)^2 / sum d^2` of the losses added by dropping one block each (negative ones count as 0): as many blocks
    as, contributing equally, would be as unequal as these; the participation ratio, between 1 and L. Ours."""
    d = np.maximum(np.asarray(damage, np.float64), 0.0)
    return float(d.sum() ** 2 / (d**2).sum()) if d.any() else 0.0


def output_effect(
    logits: Float[Array, "*n V"], changed: Float[Array, "*n V"], counted: Bool[Array, " *n"]
) -> Float[Array, ""]:
    """`||softmax(z) - softmax(z')||_2`, mean over the counted tokens, in [0, sqrt 2] (arXiv:2505.13898)."""
    gap = norm(_softmax(logits) - _softmax(changed))
    counted = counted.astype(jnp.float32)
    return jnp.sum(gap * counted) / jnp.maximum(jnp.sum(counted), 1.0)


def _softmax(logits):
    shifted = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return shifted / jnp.sum(shifted, axis=-1, keepdims=True)
