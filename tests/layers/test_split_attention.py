"""Attention over sequences whose tokens are split over devices is attention over whole ones, gradients and all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import PartitionSpec as P

from nagjax.layers.attend import attend
from nagjax.layers.where import Where
from nagjax.runs.config import MeshConfig
from nagjax.train.distributed.mesh import make_mesh, row_axes
from pallas_kernels import shard_rows
from tests.tolerance import assert_close

TOKENS, HEADS, KEYS, WIDTH = 256, 2, 2, 128


def outputs(implementation, mesh=None):
    """The output of attention, and the gradients of its inputs."""
    q, k, v, weights = 0.5 * np.random.default_rng(0).standard_normal((4, 2, TOKENS, HEADS, WIDTH)).astype(np.float32)
    segments = jnp.asarray(np.array([[1] * 100 + [2] * 156, [1] * 200 + [2] * 40 + [0] * 16]))
    first = jnp.array([[0] * 100 + [100] * 156, [0] * 200 + [200] * 40 + [240] * 16])
    where = Where(segments, jnp.arange(TOKENS) - first)

    def loss(q, k, v):
        mixed = attend(q, k, v, where, where, implementation)
        return jnp.sum(mixed * weights), mixed

    run = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    if mesh is None:
        return jax.device_get(jax.jit(run)(q, k, v))
    rows = jax.sharding.NamedSharding(mesh, row_axes(mesh))
    return jax.device_get(jax.jit(shard_rows(run, mesh, row_axes(mesh)), in_shardings=rows)(q, k, v))


@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_split_tokens_change_nothing(implementation, monkeypatch):
    whole = outputs("xla")
    interpreted = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", interpreted)
    mesh = make_mesh(MeshConfig(data=2, tensor=2, sequence=2))
    assert row_axes(mesh) == P(("data", "fsdp", "expert"), "sequence")
    (_, mixed), grads = outputs(implementation, mesh)
    assert_close(mixed, whole[0][1], terms=256, chain=3)
    for got, want in zip(grads, whole[1], strict=True):
        assert_close(got, want, terms=256, chain=6)
