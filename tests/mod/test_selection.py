"""Exactly k tokens, in their order."""

import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.layers.where import Where
from nagjax.mod import ModConfig, kept
from nagjax.mod.routed import MoD
from nagjax.mod.selection import is_chosen, lowered, top_tokens
from nagjax.residual import find_scheme


def choose(scores, k, segments=None):
    scores = jnp.asarray(scores, jnp.float32)
    where = Where.whole(*scores.shape)
    if segments is not None:
        where = where._replace(segments=jnp.asarray(segments))
    return top_tokens(scores, where, k)


def test_ties_do_not_cost_a_token():
    """A strict comparison with the k-th score would keep fewer than k; of two equal scores the earlier is taken."""
    chosen = choose([[1.0, 2.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0, 3.0]], 2)
    np.testing.assert_array_equal(chosen.indices, [[1, 2], [0, 1]])
    np.testing.assert_array_equal(chosen.cut, [2.0, 3.0])


def test_the_margin_of_a_threshold_is_of_the_coarser_of_residual_and_branches():
    rules = lambda dtype: MoD.of(find_scheme("nag")(), ModConfig(rate=(0.5,)), 8, dtype)  # noqa: E731
    cut, x = jnp.float32(1.0), jnp.zeros((1, 1, 4))
    margin = lambda dtype, x: float(cut - rules(dtype)._lowered(cut, x))  # noqa: E731
    assert margin(jnp.float32, x) == 2.0**-16
    assert margin(jnp.bfloat16, x) == margin(jnp.float32, x.astype(jnp.bfloat16)) == 2.0**-8


def test_indices_are_sorted_and_int32():
    scores = np.random.default_rng(0).standard_normal((4, 33))
    chosen = choose(scores, 12)
    assert chosen.indices.dtype == jnp.int32
    np.testing.assert_array_equal(chosen.indices, np.sort(np.argsort(-scores, axis=-1)[:, :12], axis=-1))
    np.testing.assert_array_equal(is_chosen(chosen.indices, 33), scores >= np.sort(scores)[:, [-12]])


def test_padding_goes_last():
    chosen = choose([[5.0, 1.0, 2.0, 9.0]], 2, [[0, 1, 1, 0]])
    np.testing.assert_array_equal(chosen.indices, [[1, 2]])
    assert choose([[5.0, 1.0, 2.0, 9.0]], 3, [[0, 1, 1, 0]]).indices.shape == (1, 3)


@pytest.mark.parametrize("dtype, sums", [(jnp.float32, 4096), (jnp.bfloat16, 1)])
def test_a_score_equal_to_the_cut_but_for_rounding_reaches_it(dtype, sums):
    """The error of a sum of so many terms is about sqrt(n) units in the last place of what was added up."""
    error = 0.99 * np.sqrt(sums) * float(jnp.finfo(dtype).eps) / 2
    cuts, inside = np.float32([1e-3, 0.7, 40.0, -2.0, 1e-7]), np.float32([1e-3, 0.7, 40.0, 2.0, 1.0])
    limits = np.asarray(lowered(jnp.asarray(cuts), 1.0, dtype))
    assert np.all(cuts - error * np.maximum(inside, 1.0) >= limits)
    assert np.all(limits >= cuts - 5 * error * np.maximum(inside, 1.0))
    positive = np.asarray(lowered(jnp.asarray(cuts[:2]), 0.0, dtype))  # nothing cancels: relative alone
    assert np.all(cuts[:2] * (1 - error) >= positive) and np.all(positive >= cuts[:2] * (1 - 5 * error))
    odd = lowered(jnp.array([np.inf, -np.inf, np.nan]), 1.0, dtype)
    np.testing.assert_array_equal(odd, [np.inf, -np.inf, -np.inf])


@pytest.mark.parametrize(
    "rate, tokens, k",
    [(0.0, 7, 7), (0.25, 8, 6), (0.7, 10, 3), (0.9, 10, 1), (0.999, 8, 1), (1.0, 8, 0), (0.1, 8, 8), (1 - 1e-12, 8, 1)],
)
def test_kept_is_the_ceiling_and_never_zero_unasked(rate, tokens, k):
    assert kept(rate, tokens) == k
