import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.measure.cuts import Cutter, choose, cosines_and_angles, forward_without
from nagjax.mod import ModConfig
from nagjax.model.transformer import Transformer
from nagjax.residual import find_scheme
from nagjax.runs.opening import OpenRun
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


def test_small_angles_are_exact():
    """Where arccos of a cosine in float32 has no digit left."""
    turned = np.radians([0.0, 0.0172])
    plane = np.stack([np.cos(turned), np.sin(turned)], axis=-1).astype(np.float32)[:, None, None]
    weights = np.array([[3.0]], np.float32)
    _, angle = cosines_and_angles(np.sqrt(2, dtype=np.float32) * plane, weights)
    np.testing.assert_allclose(angle[0, 1] / 3, turned[1] / np.pi, rtol=1e-3)


def test_a_batch_without_a_counted_token_is_in_no_mean():
    plan = tiny.blueprint(tiny.run_config(find_scheme("plain")()))
    cutter = Cutter(OpenRun("run", plan, 100, tiny.moved(tiny.created(find_scheme("plain")()).params), {}, None))
    batch = packed_batch()
    empty = batch._replace(weights=np.zeros_like(batch.weights))
    late = batch._replace(weights=np.where(np.arange(len(batch.tokens))[:, None] == 7, batch.weights, 0))
    for text in ([empty, batch], [late]):
        cosine, angle = cutter.measure(text)
        assert_close(np.diag(cosine), np.ones(4), **tiny.FORWARD)
        assert np.all(angle[0, 1:] > 0)
    assert cutter.loss([empty, batch]) == cutter.loss([batch])
    for asked in (cutter.measure, cutter.loss):
        with pytest.raises(UserError, match="no target in these batches counts"):
            asked([empty])


def test_choices():
    # Residuals in a plane: blocks turn them by 20, 5, 10, 1 and 30 degrees.
    angle = np.radians(np.cumsum([0, 20, 5, 10, 1, 30]))
    between = np.abs(angle[:, None] - angle[None])
    assert choose("late", 2, np.cos(between), between) == [3, 4]
    ends = [choose("penultimate", count, np.cos(between), between) for count in (1, 2, 4, 5)]
    assert ends == [[3], [2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert choose("influence", 2, np.cos(between), between) == [1, 3]
    assert choose("angle", 2, np.cos(between), between) == [2, 3]
    assert choose("angle", 3, np.cos(between), between) == [1, 2, 3]
    assert all(choose(way, 0, np.cos(between), between) == [] for way in ("late", "penultimate", "influence", "angle"))
