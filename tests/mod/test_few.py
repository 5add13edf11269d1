"""Which rows of a batch are gathered if only some run, and where their results go."""

import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.layers.where import Where
from nagjax.mod import ragged


def test_a_size_holds_everyone_who_runs():
    assert ragged.sizes(16, 1, cached=True) == (2, 4, 6, 8, 10, 12, 14, 16)
    assert ragged.sizes(3, 128, cached=True) == tuple(range(16, 129, 16))
    assert ragged.sizes(4, 1, cached=True) == (4,) and ragged.sizes(3, 64, cached=True) == (64,)
    assert ragged.sizes(16, 1, cached=False) == (16,) and ragged.sizes(3, 128, cached=False) == (128,)
    ran = np.random.default_rng(0).random((5, 9)) < 0.4
    assert ragged.needed(jnp.asarray(ran)) == ran.sum(1).max()
    assert ragged.needed(jnp.asarray(ran[:, :1])) == ran[:, 0].sum()


@pytest.mark.parametrize("tokens", [1, 9])
def test_results_go_where_they_came_from(tokens):
    draw = np.random.default_rng(1)
    ran = draw.random((6, tokens)) < 0.5
    x, where = jnp.asarray(draw.random((6, tokens, 3))), Where.whole(6, tokens)
    least, whole = int(ragged.needed(jnp.asarray(ran))), 6 if tokens == 1 else tokens
    for size in range(least, whole + 1):
        few = ragged.Few.of(jnp.asarray(ran), size, where)
        rows, mine, there = few.take((x, jnp.asarray(ran), where))
        assert mine.sum() == ran.sum() and rows.shape[0 if tokens == 1 else 1] == size
        doubled = few.put(x, jnp.where(mine[..., None], 2 * rows, rows))
        np.testing.assert_array_equal(doubled, np.where(ran[..., None], 2 * x, x))
        np.testing.assert_array_equal(few.put(where.positions, there.positions), where.positions)
