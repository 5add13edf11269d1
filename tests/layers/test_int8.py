"""Matmuls with weights in 8 bits, in the dtype that is asked for."""

import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.layers.embedding import unembed
from nagjax.layers.int8 import quantized


def made(dtype, seed=0):
    random = np.random.default_rng(seed)
    x = jnp.asarray(random.standard_normal((1, 50, 64)), dtype)
    return x, quantized(jnp.asarray(random.standard_normal((1024, 64), np.float32)), over=-1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_float32_whatever_the_hidden_states_are(dtype):
    """Rounded to bfloat16 the largest logit is one of several in 3% of the rows."""
    x, table = made(dtype)
    found = np.asarray(unembed(x, jnp.zeros(x.shape[:2]), table))
    want = np.asarray(x, np.float64) @ (np.asarray(table.values, np.float64) * np.asarray(table.scale, np.float64)).T
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(table.values, np.float64) * np.asarray(table.scale)).T
    assert found.dtype == np.float32
    assert np.all(np.abs(found - want) <= 66 * 2**-24 * size)  # sums of 64 products, and the scale
    assert np.all(np.sum(found == found.max(-1, keepdims=True), -1) == 1)


@pytest.mark.parametrize("asked", [None, "float32", "bfloat16"])
def test_a_product_is_in_the_dtype_that_is_asked_for(asked):
    x, table = made("bfloat16")
    found = table.product(x, 1, asked)
    assert found.dtype == (asked or "bfloat16")
    np.testing.assert_array_equal(found, table.product(x, 1, jnp.float32).astype(found.dtype))
