"""A fresh model of any depth knows nothing (loss log V) and learns from the first steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.residual.registry import find_scheme, schemes
from nagjax.train.abstract_step import abstract_batch
from nagjax.train.evaluator import put
from nagjax.train.loss import Batch, cross_entropy
from nagjax.train.step import jit_train_step
from tests import tiny

VOCAB, BATCH, TOKENS = 257, 4, 32


def text(seed) -> Batch:
    """A language of 16 words in which every word has two successors."""
    noise = np.random.default_rng(seed)
    words = np.empty((BATCH, TOKENS + 1), np.int32)
    words[:, 0] = noise.integers(0, 16, BATCH)
    for t in range(TOKENS):
        words[:, t + 1] = (3 * words[:, t] + noise.integers(0, 2, BATCH)) % 16
    words = 16 * words + 5
    positions = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), (BATCH, TOKENS))
    return Batch(words[:, :-1], words[:, 1:], np.ones_like(positions), positions, np.ones(positions.shape, np.float32))


def config(scheme, depth):
    return tiny.run_config(
        find_scheme(scheme)(), train={"steps": 50, "batch": BATCH}, depth=depth, context=TOKENS, vocab=VOCAB
    )


def test_nag_starts_at_log_v_and_learns_at_96_blocks():
    bp = tiny.blueprint(config("nag", 96))
    options = {"xla_backend_optimization_level": 1}  # here steps are what costs, five times as much without
    step = jit_train_step(bp).lower(bp.abstract(), abstract_batch(bp)).compile(options)
    state, losses = tiny.fresh(bp), []
    for seed in range(20):
        state, metrics = step(state, put(bp, text(seed)._asdict()))
        losses.append(metrics.loss)
    losses = np.array(jax.device_get(losses))
    assert abs(losses[0] / np.log(VOCAB) - 1) < 0.05
    assert losses.max() < 1.05 * losses[0]
    assert np.mean(losses[10:15]) < losses[0] - 0.3
    assert np.log(2) - 0.1 < np.mean(losses[-5:]) < np.mean(losses[10:15]) - 0.05  # its entropy is log 2


@pytest.mark.parametrize("name", sorted(set(schemes()) - {"nag"}))
def test_every_scheme_starts_at_log_v_at_96_blocks(name):
    bp = tiny.blueprint(config(name, 96))

    @jax.jit
    def start(params):
        tokens = jax.random.randint(jax.random.key(7), (2, BATCH, TOKENS), 0, VOCAB)
        batch = text(0)._replace(tokens=tokens[0], targets=tokens[1])
        model = bp.model(params)
        sums = cross_entropy(model.logits(model(batch.tokens, batch.where, progress=jnp.float32(0.0))), batch)
        return sums.nats / sums.count

    assert abs(float(start(bp.init_params(0))) / np.log(VOCAB) - 1) < 0.05
