"""Confidence against accuracy, where both are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.measure.calibration import confidence, expected_calibration_error, reliability, reliability_on
from nagjax.measure.masked import MaskedBatch
from nagjax.residual import find_scheme
from tests import tiny
from tests.tolerance import assert_close

TOKENS, VOCAB = 20_000, 8


def of(logits, targets, weights=None):
    sure, right = confidence(logits, targets)
    return reliability(sure, right, jnp.ones(sure.shape) if weights is None else weights)


def drawn(noise, scale):
    """Targets drawn from the predictions' own distribution, and logits `scale` times as sharp."""
    logits = 2.0 * jax.random.normal(noise, (TOKENS, VOCAB))
    return scale * logits, jax.random.categorical(jax.random.fold_in(noise, 1), logits)


def test_targets_drawn_from_the_predictions_leave_only_the_noise_of_drawing_them():
    found = of(*drawn(jax.random.key(0), 1.0))
    count = np.maximum(found[:, 0], 1)
    # Each bin's mean is within four standard deviations of a sum of independent guesses.
    spread = 4 * np.sqrt(found[:, 1] / count * (1 - found[:, 1] / count) / count)
    assert np.all(np.abs(found[:, 2] - found[:, 1]) / count <= spread)
    assert expected_calibration_error(found) < np.sum(count * spread) / TOKENS


@pytest.mark.parametrize("scale, sign", [(3.0, 1), (0.2, -1)])
def test_sharper_predictions_are_overconfident_and_flatter_ones_underconfident(scale, sign):
    found = of(*drawn(jax.random.key(0), scale))
    apart = np.asarray(found[:, 1] - found[:, 2])
    assert sign * apart.sum() / TOKENS > 0.1
    assert expected_calibration_error(found) >= abs(apart.sum()) / TOKENS * (1 - 1e-5)


def test_bins_by_hand_and_weights():
    """Confidences 0.5 and 0.9 of two entries, in bins 2 and 4 of 4; 0.5 is the upper end of its bin."""
    logits = jnp.log(jnp.array([[0.5, 0.5], [0.9, 0.1], [0.9, 0.1], [0.1, 0.9]]))
    sure, right = confidence(logits, jnp.array([0, 0, 1, 0]))
    found = reliability(jnp.round(sure, 6), right, jnp.array([1.0, 1.0, 1.0, 0.0]), bins=4)
    assert_close(found, np.array([[0, 0, 0], [1, 0.5, 1], [0, 0, 0], [2, 1.8, 1]]), terms=2)
    assert_close(expected_calibration_error(found), (0.5 + 0.8) / 3, terms=4)
    assert_close(expected_calibration_error(1e-3 * found), (0.5 + 0.8) / 3, terms=8)


def test_batches_add_up_and_no_token_is_no_error():
    logits, targets = drawn(jax.random.key(3), 2.0)
    parts = [of(logits[own], targets[own]) for own in (slice(None, 7000), slice(7000, None))]
    assert_close(parts[0] + parts[1], of(logits, targets), terms=TOKENS)
    assert expected_calibration_error(of(logits, targets, jnp.zeros(TOKENS))) == 0.0


def test_of_masked_text_the_masked_tokens_count():
    """What a bidirectional model sees it is sure of, and right."""
    blueprint = tiny.blueprint(tiny.run_config(find_scheme("plain")(), depth=1, context=16))
    model = blueprint.model(jax.jit(lambda: blueprint.init_params(0))())
    whole = tiny.packed_batch(0, tokens=16)
    hidden = jnp.arange(16) % 5 == 0
    batch = MaskedBatch(*whole._replace(weights=jnp.broadcast_to(hidden, whole.tokens.shape).astype(jnp.float32)))
    assert reliability_on(model, [batch])[:, 0].sum() == batch.weights.sum() < batch.counted.sum()
    with pytest.raises(UserError, match="batches = "):
        reliability_on(model, [])
