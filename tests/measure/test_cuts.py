import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.measure.cuts import choose, forward_without
from nagjax.mod import ModConfig
from nagjax.model.transformer import Transformer
from nagjax.residual import find_scheme
from tests import tiny
from tests.tiny import model_config, packed_batch
from tests.tolerance import assert_close


@pytest.mark.parametrize("name", ["plain", "lns", "nag"])
def test_a_cut_model_is_one_whose_sublayers_are_removed(name):
    """Mixture-of-Depths at rate 1 removes them too. Both leave the others at their place in depth."""
    config, scheme, batch = model_config(depth=4), find_scheme(name)(), packed_batch()
    model = Transformer(config, scheme, nnx.Rngs(0))

    def logits(model):
        return model.logits(model(batch.tokens, batch.where))

    def cut(model, stays):
        return forward_without(model, batch, stays)

    cut = nnx.jit(cut)
    got, directions = cut(model, jnp.ones(4, bool))
    real = np.asarray(batch.weights) > 0
    assert_close(got[real], nnx.jit(logits)(model)[real], **tiny.FORWARD)
    assert directions.shape == (5, *batch.tokens.shape, config.width)
    rates = (0.0, 1.0, 0.0, 1.0)
    mod = ModConfig(attention_rate=rates, mlp_rate=rates, router="random")
    removed = Transformer(dataclasses.replace(config, mod=mod), scheme, nnx.Rngs(0))
    got, directions = cut(model, jnp.array([True, False, True, False]))
    assert_close(got[real], nnx.jit(logits)(removed)[real], **tiny.FORWARD)
    np.testing.assert_array_equal(directions[1], directions[2])
    assert not jnp.allclose(directions[2], directions[3])


def test_choices():
    # Residuals in a plane: blocks turn them by 20, 5, 10, 1 and 30 degrees.
    angle = np.radians(np.cumsum([0, 20, 5, 10, 1, 30]))
    between = np.abs(angle[:, None] - angle[None])
    assert choose("late", 2, np.cos(between), between) == [3, 4]
    assert choose("influence", 2, np.cos(between), between) == [1, 3]
    assert choose("angle", 2, np.cos(between), between) == [2, 3]
    assert choose("angle", 3, np.cos(between), between) == [1, 2, 3]
    assert all(choose(way, 0, np.cos(between), between) == [] for way in ("late", "influence", "angle"))
