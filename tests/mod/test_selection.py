"""Exactly k tokens, in their order."""

import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.layers.where import Where
from nagjax.mod import kept
from nagjax.mod.selection import is_chosen, top_tokens


def choose(scores, k, segments=None):
    scores = jnp.asarray(scores, jnp.float32)
    where = Where.whole(*scores.shape)
    if segments is not None:
        where = where._replace(segments=jnp.asarray(segments))
    return top_tokens(scores, where, k)


def test_ties_do_not_cost_a_token():
    """A strict comparison with the k-th score would keep fewer; the earlier of two equals goes first."""
    chosen = choose([[1.0, 2.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0, 3.0]], 2)
    np.testing.assert_array_equal(chosen.indices, [[1, 2], [0, 1]])
    np.testing.assert_array_equal(chosen.cut, [2.0, 3.0])


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


@pytest.mark.parametrize(
    "rate, tokens, k", [(0.0, 7, 7), (0.25, 8, 6), (0.7, 10, 3), (0.9, 10, 1), (0.999, 8, 1), (1.0, 8, 0), (0.1, 8, 8)]
)
def test_kept_is_the_ceiling_and_never_zero_unasked(rate, tokens, k):
    assert kept(rate, tokens) == k
