"""Which schemes are trained on which meshes of eight devices: all on all with EVERY_MESH=1 (make test-meshes), else one
of every kind on the one of three axes, and few on the others."""

import os
from collections.abc import Iterable

import jax
import numpy as np
import pytest

from nagjax.runs.config import RunConfig
from nagjax.train.distributed.mesh import batch_sharding
from nagjax.train.step import jit_train_step
from tests import tiny
from tests.tolerance import assert_close

MESHES = {"data": (8,), "fsdp": (1, 8), "tensor": (2, 2, 2), "mixed": (2, 2, 1, 2), "sequence": (1, 1, 1, 8)}
EVERY = os.environ.get("EVERY_MESH", "") not in ("", "0")


def pairs(schemes: Iterable[str], meshes: Iterable[str], few: Iterable[str], usual: Iterable[str]) -> list:
    """Parameters `name, mesh`: the `few` schemes on all the meshes, the others on the `usual` ones or, asked to, on
    all."""
    meshes, few, usual = list(meshes), set(few), set(usual)
    return [
        pytest.param(name, MESHES[mesh], id=f"{name}-{mesh}")
        for name in schemes
        for mesh in meshes
        if EVERY or name in few or mesh in usual
    ]


def check_losses(config: RunConfig, axes: dict[str, int]) -> None:
    """Two steps on this mesh of eight devices have the losses and norms of gradients that one device has."""
    seen = []
    for own in ({}, axes):
        bp = tiny.blueprint(config, **own)
        state, step = jax.device_put(tiny.fresh(tiny.blueprint(config)), bp.shardings()), jit_train_step(bp)
        losses = []
        for seed in range(2):
            state, metrics = step(state, jax.device_put(tiny.packed_batch(seed), batch_sharding(bp.mesh)))
            losses.append([float(metrics.loss), float(metrics.grad_norm)])
        seen.append(losses)
    assert_close(np.array(seen[1]), np.array(seen[0]), **tiny.steps(2))
