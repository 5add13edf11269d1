"""The distribution from which tokens are drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.generate.choose import Sampling, choose, nucleus

DRAW = jax.jit(choose)


def nucleus_by_hand(logits, top_p):
    """Tokens in order of probability until their sum reaches top_p, float64."""
    mask = np.zeros(logits.shape, bool)
    for row, inside in zip(logits.astype(np.float64), mask, strict=True):
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        total = 0.0
        for token in sorted(range(len(row)), key=lambda i: (-row[i], i)):
            if total >= top_p:
                break
            inside[token] = True
            total += probabilities[token]
    return mask


def kept(logits, top_p):
    """The nucleus as a mask over token ids."""
    order, inside = nucleus(jnp.asarray(logits), jnp.float32(top_p))
    mask = np.zeros(logits.shape, bool)
    np.put_along_axis(mask, np.asarray(order), np.asarray(inside), axis=-1)
    return mask


@pytest.mark.parametrize("top_p", [1e-5, 0.1, 0.5, 0.9, 0.999])
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p):
    logits = np.random.default_rng(0).normal(0, 3, (64, 50)).astype(np.float32)
    rounding = 1e-6  # of a float32 sum of 50 probabilities
    seen = kept(logits, top_p)
    assert np.all(nucleus_by_hand(logits, top_p - rounding) <= seen)
    assert np.all(seen <= nucleus_by_hand(logits, top_p + rounding))


def test_nucleus_includes_the_crossing_token_and_breaks_ties_by_id():
    logits = np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    for top_p, expected in [(0.4, [0, 1, 0]), (0.51, [1, 1, 0]), (0.76, [1, 1, 1])]:
        assert kept(logits, top_p).tolist() == [[bool(i) for i in expected]]


def allowed(scaled, top_k, top_p, min_p):
    """Which of one row's tokens may be drawn, float64: each filter works on what the last one left."""
    likeliest = sorted(range(scaled.size), key=lambda i: (-scaled[i], i))[: top_k or scaled.size]
    left = np.where(np.isin(np.arange(scaled.size), likeliest), scaled, -np.inf)
    left = np.where(nucleus_by_hand(left[None], top_p)[0], left, -np.inf)
    return np.exp(left - left.max()) >= max(min_p, 1e-300)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 0.8, 0.0),
        (1.5, 0, 0.6, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, 4, 0.8, 0.0),  # of the four likeliest alone 80% is fewer than of all
        (1.0, 0, 1.0, 0.2),
        (0.8, 0, 0.9, 0.1),
        (1.2, 6, 0.95, 0.15),
        (1.0, 99, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 1.0, 1.0),
    ],
)
def test_draws_follow_what_the_filters_leave(temperature, top_k, top_p, min_p):
    draws = 40_000
    logits = np.random.default_rng(1).normal(0, 1.5, (1, 12)).astype(np.float32)
    scaled = logits.astype(np.float64)[0] / temperature
    expected = np.where(allowed(scaled, top_k, top_p, min_p), np.exp(scaled), 0.0)
    expected /= expected.sum()
    keys = jax.random.split(jax.random.key(0), draws)
    sampling = Sampling(np.float32(temperature), np.int32(top_k), np.float32(top_p), np.float32(min_p))
    tokens = DRAW(jnp.asarray(logits).repeat(draws, 0), keys, sampling)
    seen = np.bincount(tokens, minlength=12) / draws
    assert np.all(seen[expected == 0] == 0)
    assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-9)


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_no_temperature_takes_the_likeliest(temperature):
    logits = jnp.array([[0.0, 3.0, 2.99], [1e4, -1e4, 1e4 - 1]])
    keys = jax.random.split(jax.random.key(0), 2)
    assert choose(logits, keys, Sampling(jnp.float32(temperature), top_p=jnp.float32(0.9))).tolist() == [1, 0]
