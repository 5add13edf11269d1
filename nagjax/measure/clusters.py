"""Clusters of tokens by how far each block turns them: principal components and k-means of the turns (Liu et al. 2026,
arXiv:2602.05970, Figure 2)."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.cluster.vq import kmeans2

from nagjax.errors import UserError
from nagjax.ranges import Count, Seed, check_value


class Clusters(NamedTuple):
    """k clusters of N tokens, the largest first: the cluster of each token, and the mean turns (radians) and the share
    of each cluster.

    explained: shares of the variance along the first principal components, the largest first.
    """

    labels: Int[np.ndarray, " N"]
    centres: Float[np.ndarray, "k L"]
    shares: Float[np.ndarray, " k"]
    explained: Float[np.ndarray, " c"]


def explained_variance(turns: Float[np.ndarray, "N L"], components: int = 2) -> Float[np.ndarray, " c"]:
    """The share of the variance along each of the first principal components, at most `components` of them; 0 if
    nothing varies."""
    turns = np.asarray(turns, np.float64)
    spread = np.linalg.svd(turns - turns.mean(axis=0), compute_uv=False) ** 2
    return (spread / max(spread.sum(), np.finfo(np.float64).tiny))[:components]


def clusters(
    turns: Float[np.ndarray, "N L"], k: int = 2, *, starts: int = 10, seed: int = 0, components: int = 2
) -> Clusters:
    """Clusters the tokens' turns [N, L], radians, by k-means. Of `starts` runs from different first centres
    (k-means++), the one with the least sum of squared distances is returned.

    Raises UserError for turns that are not finite or no matrix, for fewer different tokens than clusters, and for a
    number out of range.
    """
    for name, value in (("k", k), ("starts", starts), ("components", components)):
        check_value(name, value, Count)
    check_value("seed", seed, Seed)
    turns = np.asarray(turns, np.float64)
    if turns.ndim != 2 or not np.all(np.isfinite(turns)):
        raise UserError("turns", turns.shape, "give finite radians [tokens, blocks]")
    if len(np.unique(turns, axis=0)) < k:
        raise UserError("k", k, f"there are {len(np.unique(turns, axis=0))} different tokens: ask for fewer groups")
    random = np.random.default_rng(seed)
    found = [kmeans2(turns, k, minit="++", rng=random) for _ in range(starts)]
    labels = min((own for _, own in found), key=lambda own: _inertia(turns, own, k))
    order = np.argsort(-np.bincount(labels, minlength=k), kind="stable")
    labels = np.argsort(order)[labels]
    count = np.bincount(labels, minlength=k)
    centres = _centres(turns, labels, k)
    return Clusters(labels, centres, count / len(turns), explained_variance(turns, components))


def _centres(turns: np.ndarray, labels: np.ndarray, k: int) -> np.ndarray:
    """The mean of each cluster; NaN if it has no token."""
    sums = np.zeros((k, turns.shape[1]))
    np.add.at(sums, labels, turns)
    count = np.bincount(labels, minlength=k)[:, None]
    return np.divide(sums, count, out=np.full(sums.shape, np.nan), where=count > 0)


def _inertia(turns: np.ndarray, labels: np.ndarray, k: int) -> float:
    """Sum of the squared distances to the means; infinite if a cluster is empty."""
    if len(np.unique(labels)) < k:
        return np.inf
    return float(np.sum((turns - _centres(turns, labels, k)[labels]) ** 2))
