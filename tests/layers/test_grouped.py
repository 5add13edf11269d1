"""Grouped matmuls by tokamax's kernels: what is done around them, and when they are taken. The kernels are
compiled in tests/aot, and run on a device by `benchmarks/device.py`."""

import importlib.util
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.layers import grouped, ragged
from nagjax.layers.platform import installed, tracing_for, warn_once

ROWS, EXPERTS, WIDTH, HIDDEN = 40, 5, 8, 16


@jax.custom_vjp
def kernel(rows, matrices, group_sizes):
    """What tokamax's leaves unwritten is not a number here."""
    return unwritten(jax.lax.ragged_dot(rows, matrices, group_sizes), group_sizes)


def unwritten(rows, sizes):
    return jnp.where(jnp.arange(len(rows))[:, None] < jnp.sum(sizes), rows, jnp.nan)


def forward(rows, matrices, sizes):
    return kernel(rows, matrices, sizes), (rows, matrices, sizes)


def backward(kept, given):
    rows, matrices, sizes = kept
    by_rows, by_matrices = jax.vjp(lambda *x: jax.lax.ragged_dot(*x, sizes), rows, matrices)[1](given)
    return unwritten(by_rows, sizes), by_matrices, None


kernel.defvjp(forward, backward)


@pytest.mark.parametrize("sizes", [[8, 0, 20, 3, 9], [8, 0, 2, 3, 9], [0] * EXPERTS])
def test_rows_after_the_last_group_have_zeros_and_no_gradient(monkeypatch, sizes):
    tiles = []
    monkeypatch.setattr(
        grouped, "_kernel", lambda tile: tiles.append(tile) or (lambda *a, preferred_element_type, **k: kernel(*a, **k))
    )
    monkeypatch.setattr(ragged, "usable", lambda: True)
    noise = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(noise.normal(size=shape), jnp.float32)  # noqa: E731
    rows, matrices, cotangent = draw(ROWS, WIDTH), draw(EXPERTS, WIDTH, HIDDEN), draw(ROWS, HIDDEN)
    sizes = jnp.asarray(sizes, jnp.int32)

    def run(product):
        value, back = jax.vjp(lambda *x: product(*x, sizes), rows, matrices)
        return value, back(cotangent)

    close = dict(rtol=0, atol=64 * HIDDEN * np.finfo(np.float32).eps)
    with tracing_for("gpu"):
        by_kernel = run(ragged.ragged_matmul)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), by_kernel, run(ragged._in_blocks))
    assert tiles == [64]  # the power of two that has room for all rows


@pytest.fixture
def not_told():
    """Nothing was said, or known of packages, before; nor is it afterwards."""
    for told in (installed, warn_once):
        told.cache_clear()
    yield
    for told in (installed, warn_once):
        told.cache_clear()


@pytest.mark.usefixtures("not_told")
@pytest.mark.parametrize("platform, taken", [("cpu", False), ("tpu", False), ("gpu", True)])
def test_they_are_taken_on_gpus_with_the_package(monkeypatch, platform, taken):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(grouped.raw_triton, "missing", lambda: None)
    with tracing_for(platform):
        assert grouped.usable() == taken
    monkeypatch.setattr(grouped, "wrong_capability", lambda: "compute capability 7.5")
    with tracing_for(platform):
        assert not grouped.usable()


@pytest.mark.usefixtures("not_told")
def test_where_their_triton_compiles_nothing_they_are_not_taken(monkeypatch, caplog):
    """As beside a PyTorch that keeps an older one; said once."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(grouped.raw_triton, "missing", lambda: "jax_triton 0.4.1 needs triton 3.7 or newer")
    with tracing_for("gpu"), caplog.at_level(logging.WARNING):
        assert not grouped.usable() and not grouped.usable()
    (record,) = caplog.records
    assert "all experts on this GPU" in record.getMessage() and "needs triton 3.7" in record.getMessage()


@pytest.mark.usefixtures("not_told")
def test_without_the_package_it_is_said_once_what_that_costs(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with tracing_for("gpu"), caplog.at_level(logging.WARNING):
        assert not grouped.usable() and not grouped.usable()
    (record,) = caplog.records
    assert "pip install -e '.[tokamax]'" in record.getMessage() and "--moe.dispatch capacity" in record.getMessage()
