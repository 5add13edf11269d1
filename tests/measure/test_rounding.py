import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nagjax.measure import outliers
from nagjax.measure.rounding import float8_round_trip, integer_round_trip
from tests.tolerance import assert_close, close_to


@pytest.fixture
def noise():
    return np.random.default_rng(0).standard_normal((4, 6, 5)).astype(np.float32)


def test_integers_on_the_grid_come_back_and_others_move_by_half_a_step():
    grid = np.array([-127, -3, 0, 1, 126], np.float32) * 0.01
    assert_close(integer_round_trip(grid), grid, terms=1, chain=4)
    off = np.array([127, 1.4, 1.6, -0.3], np.float32)
    assert_close(integer_round_trip(off), [127, 1, 2, 0], terms=1, chain=4)
    assert_close(integer_round_trip(np.float32([7, 2.4, -6.6]), bits=4), [7, 2, -7], terms=1, chain=4)


def test_one_outlier_makes_the_grid_coarse_for_what_shares_its_scale(noise):
    noise[2, 3, 1] = 1000.0
    whole, by_column = integer_round_trip(noise), integer_round_trip(noise, axes=(-2,))
    assert whole[2, 3, 1] == by_column[2, 3, 1] == 1000
    assert jnp.sum(whole != 0) == 1  # steps of 8
    spared = np.ones_like(noise, bool)
    spared[2, :, 1] = False
    steps = np.abs(noise).max(axis=1, keepdims=True) / 127
    error = np.abs(by_column - noise)
    assert np.all(error <= 0.501 * steps) and error[spared].max() < 0.02 < 0.5 < error[~spared].max()


@pytest.mark.parametrize("jit", [False, True])
def test_float8_is_what_ml_dtypes_makes_of_it(noise, jit):
    one = jax.jit(float8_round_trip) if jit else float8_round_trip
    wide = noise.reshape(-1) * np.logspace(-6, 0, noise.size, dtype=np.float32)
    wide[-1] = 448.0  # the scale is 1
    expected = wide.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(one(wide), expected)
    assert np.any(expected != wide) and np.any(expected == 0)
    scaled = one(noise * 1e-20)
    assert np.abs(scaled - noise * 1e-20).max() <= np.abs(noise).max() * 1e-20 / 16
    assert np.abs(scaled).max() == close_to(np.abs(noise).max() * 1e-20, terms=1, chain=4)


def test_scales_are_per_axes_and_dtypes_stay(noise):
    apart = noise * np.float32([1e-6, 1, 1e3, 1e6])[:, None, None]
    kept = float8_round_trip(apart, axes=(-2, -1))
    assert np.all(np.abs(kept - apart).max(axis=(1, 2)) <= np.abs(apart).max(axis=(1, 2)) / 16)
    assert jnp.all(float8_round_trip(apart)[0] == 0)  # below the smallest step of one scale for all
    for trip in (integer_round_trip, float8_round_trip):
        assert trip(jnp.ones((2, 3), jnp.bfloat16)).dtype == jnp.bfloat16
        np.testing.assert_array_equal(trip(np.zeros((2, 3), np.float32)), 0)


def test_peak_and_offset():
    spike = np.zeros((1, 16), np.float32)
    spike[0, 3] = 2
    assert outliers.peak(spike)[0] == close_to(np.sqrt(15), terms=1, chain=4)
    assert outliers.peak(np.float32([[1, -1, 1, -1]]))[0] == pytest.approx(1)
    assert outliers.offset(np.float32([[2, 4, 2, 4]]))[0] == pytest.approx(3)
    assert outliers.offset(np.float32([[-1, 1]]))[0] == 0
