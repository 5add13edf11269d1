"""Residual modules as users hold them: start factors by any word, misuse, and scans of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nagjax.linen
from nagjax.errors import UserError
from nagjax.residual.module import start_factors
from tests.own_models import SUBLAYERS, WIDTH, residual, stacked


@pytest.mark.parametrize("own", [nagjax.Review, nagjax.linen.Review, "review"])
def test_start_factors_of_any_word_for_a_scheme(own):
    assert start_factors(own, 2, SUBLAYERS) == start_factors(residual("review"), 2)


def test_start_factors_of_what_tokens_skip():
    assert start_factors(nagjax.MixtureOfDepths(residual("review"), rngs=nnx.Rngs(0)), 2) == (SUBLAYERS**-0.5, 1.0)


def test_start_factors_of_numbers_of_numpy():
    assert start_factors("deepnorm", np.int64(3), np.int64(8)) == start_factors("deepnorm", 3, 8)
    for sublayers in (None, 0, 2.0, "2"):
        with pytest.raises(UserError, match=f"sublayers = {sublayers!r}: give a whole number.* in place of the scheme"):
            start_factors("nag", 1, sublayers)


def test_misuse_is_named():
    own, x = residual(), jnp.ones((2, WIDTH))
    for wrong in (lambda: own.read(x, 1), lambda: own.advance(x, x, 1), lambda: own.close(x)):
        with pytest.raises(UserError, match="stream = .*give what `open` or `advance` returned"):
            wrong()
    with pytest.raises(UserError, match="progress = 'int32': give a share of the training"):
        jax.jit(own.open)(x, jnp.int32(500))
    with pytest.raises(UserError, match="rngs = .*'dropout'.*no stream for parameters"):
        nagjax.NAG(WIDTH, 2, rngs=nnx.Rngs(dropout=0))


def test_stacked_branches_that_read_more_run_in_a_scan_of_ones_own():
    """As docs/own_models.md has it."""
    own, branches = residual(), stacked()
    x, mask = jax.random.normal(jax.random.key(0), (2, 3, WIDTH)), jnp.ones((2, 3, 1))

    def body(stream, part):
        slot, branch = part
        return own.advance(stream, branch(own.read(stream)) * mask, slot)

    stream = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(own.open(x, 1.0), (own.slots(), branches))
    np.testing.assert_allclose(own.close(stream), own(x, branches, progress=1.0), rtol=1e-5, atol=1e-6)


def test_the_residual_itself_is_its_direction_times_its_length():
    """As docs/own_models.md has it."""
    own, x = residual("plain"), jax.random.normal(jax.random.key(0), (2, 3, WIDTH))
    stream = own.open(x, 1.0)
    for i in (1, 2):
        stream = own.advance(stream, 2.0 * x, i)
    direction, log_rms = own.scheme.lanes(stream.rows)
    np.testing.assert_allclose(jnp.exp(log_rms)[..., None] * direction, 5.0 * x, rtol=1e-5, atol=1e-6)


def test_modules_that_stand_for_one_sublayer_each_are_stacks():
    """As a list of k stacks of S / k is where there is one block."""
    own, kinds = residual("plain", 2), [stacked(1, 1), stacked(2, 1)]
    x = jnp.ones((3, WIDTH)) + jnp.arange(WIDTH)
    want = own(x, [jax.tree.map(lambda p: p[0], kind) for kind in kinds], progress=1.0)
    np.testing.assert_allclose(own(x, kinds, progress=1.0), want, rtol=1e-5, atol=1e-5)


class Counts(nnx.Module):
    """A branch with state that is no array."""

    def __init__(self, rngs):
        self.calls, self.linear = nnx.Variable(0), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


@pytest.mark.parametrize("make", [lambda rngs: nnx.Conv(WIDTH, WIDTH, 1, use_bias=False, rngs=rngs), Counts])
def test_modules_that_stand_for_themselves_are_no_stacks(make):
    """Whatever their leaves have in front."""
    own, x = residual("plain", 2), jnp.ones((2, 3, WIDTH)) + jnp.arange(WIDTH)
    branches = [make(nnx.Rngs(seed)) for seed in (1, 2)]
    want = own(x, [lambda x, one=one: one(x) for one in branches], progress=1.0)
    np.testing.assert_array_equal(own(x, branches, progress=1.0), want)
