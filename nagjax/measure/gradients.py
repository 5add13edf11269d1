"""Size of the gradients at every depth, and spikes of a training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def stacked_norms(gradient: Any) -> Float[Array, " L"]:
    """`||dL/dtheta_l||` of each block, float32, from a tree of gradients whose leaves are stacked [L, ...]."""
    squares = [
        jnp.sum(leaf.astype(jnp.float32) ** 2, axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(gradient)
    ]
    return jnp.sqrt(sum(squares))


@jax.custom_vjp
def tap(h: Float[Array, "*n D"], meter: Float[Array, ""]) -> Float[Array, "*n D"]:
    """Returns `h` unchanged, and makes `||dL/dh||^2` the gradient of `meter`, whose value does not matter. With it a
    scan gives the norm of the gradient at every depth without storing the gradients."""
    return h


def _tap(h, meter):
    return h, meter


def _tapped(meter, g):
    return g, jnp.sum(g.astype(jnp.float32) ** 2).astype(meter.dtype)


tap.defvjp(_tap, _tapped)


def spike_score(values: Float[np.ndarray, " N"], window: int = 1000, deviations: float = 7.0) -> float:
    """Share of the steps whose value (a loss or gradient norm) lies at least `deviations` standard deviations (7 in the
    source) from the mean of the `window` steps before it (OLMo 2, arXiv:2501.00656, Section 3). Values that are not
    finite are left out, also of windows: a log has null for bad steps and for batches without a counted target. Steps
    before the first full window do not count; NaN if there are no others."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if len(values) <= window:
        return float("nan")
    windows = np.lib.stride_tricks.sliding_window_view(values, window)[:-1]
    mean, spread = windows.mean(axis=1), windows.std(axis=1)
    return float(np.mean(np.abs(values[window:] - mean) >= deviations * np.maximum(spread, 1e-30)))
