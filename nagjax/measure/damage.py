"""Damage from leaving out a block. `s` is the block that is left out, `l` a later one."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from nagjax.measure.norms import norm

LEAST = 1e-6  # lower bound of an update's length in relative changes


def skip_effect(update: Float[Array, "*n D"], changed: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """Relative change `||u - u'|| / max(||u||, 1e-6)` of a later block's update `u` when an earlier block is skipped
    (Csordas et al. 2025, arXiv:2505.13898, Section 3, who take the maximum over positions and prompts)."""
    return norm(update - changed) / jnp.maximum(norm(update), LEAST)


def depth_score(effects: Float[np.ndarray, "L L"]) -> float:
    """`sum_s s e_s / sum_s e_s` with `e_s = mean_{l > s} effects[s, l]`, blocks counted from 1. It is higher if later
    computation builds on deep blocks (arXiv:2505.13898). The last block has no later one and does not count.

    Equal effects give L/2, whatever their size. NaN if nothing has any effect, if an effect is not finite, or with
    fewer than two blocks.
    """
    effects = np.asarray(effects, np.float64)
    blocks = len(effects)
    own = np.array([effects[s, s + 1 :].mean() for s in range(blocks - 1)])
    return float(own @ np.arange(1, blocks) / own.sum()) if 0 < own.sum() < np.inf else float("nan")


def contributing(damage: Float[np.ndarray, " L"]) -> float:
    """The effective number of contributing blocks: the participation ratio `(sum d)^2 / sum d^2` of the losses d that
    dropping each block alone adds (negative values count as 0). It lies between 1 and L, or is 0 if no block
    contributes. This use is ours.

    If the loss without some blocks is not finite, the result is their number: the limit of the ratio as their damage
    grows.
    """
    d = np.maximum(np.asarray(damage, np.float64), 0.0)
    if (lost := ~np.isfinite(d)).any():
        return float(lost.sum())
    return float(d.sum() ** 2 / (d**2).sum()) if d.any() else 0.0


def output_effect(logits: Float[Array, "*n V"], changed: Float[Array, "*n V"]) -> Float[Array, " *n"]:
    """`||softmax(z) - softmax(z')||_2`, in [0, sqrt 2] (arXiv:2505.13898)."""
    return norm(jax.nn.softmax(logits) - jax.nn.softmax(changed))
