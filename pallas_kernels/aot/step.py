"""A training step for four devices with an op in every block: rows sharded, parameters replicated.

Two scanned blocks with rematerialisation, a squared loss, plain gradient descent. Rows never leave their
device, so the only communication there can be is the sum of the parameters' gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct as Like
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import shard_rows

LAYERS, BATCH, TOKENS, WIDTH, GATES = 2, 8, 128, 512, 32
SQUARE = (WIDTH, WIDTH)


def add_rms_norm(devices: list, implementation: str) -> tuple[Callable, tuple, Mesh]:
    """Pre-norm blocks with LayerNorm Scaling."""

    def block(carry, p):
        stream, normed = carry
        update = _branch(normed, p)
        return pallas_kernels.add_rms_norm(stream, update, p["gain"], p["scale"])

    return _step(devices, implementation, block, lambda rows: (rows, rows), w=SQUARE, gain=(WIDTH,), scale=())


def review_update(devices: list, implementation: str) -> tuple[Callable, tuple, Mesh]:
    """Review Residuals with the dense gate."""

    def block(carry, p):
        stream, normed = carry
        update = _branch(normed, p)
        gates = stream @ p["w_h"].astype(stream.dtype), update @ p["w_u"].astype(stream.dtype)
        vectors = p["bias"], p["gain"]
        return pallas_kernels.review_update(stream, update, *gates, *vectors)

    shapes = dict(w=SQUARE, w_h=SQUARE, w_u=SQUARE, bias=(WIDTH,), gain=(WIDTH,))
    return _step(devices, implementation, block, lambda rows: (rows, rows), **shapes)


def nag_update(devices: list, implementation: str) -> tuple[Callable, tuple, Mesh]:
    """NAG blocks with one learned rotation per layer."""

    def block(carry, p):
        direction, log_norm = carry
        turn = jnp.broadcast_to(p["turn"], log_norm.shape)
        update = _branch(direction, p)
        return pallas_kernels.nag_update(direction, log_norm, update, turn)

    return _step(devices, implementation, block, lambda rows: (rows, jnp.zeros(rows.shape[:-1])), w=SQUARE, turn=())


def nag_update_modulated(devices: list, implementation: str) -> tuple[Callable, tuple, Mesh]:
    """NAG blocks with modulators."""
    gate = dict(weight=(WIDTH, GATES), bias=(GATES,), logits=(GATES,), beta=(), alpha=())

    def block(carry, p):
        inputs = *carry, _branch(carry[0], p), *(p[name] for name in gate)
        return pallas_kernels.nag_update_modulated(*inputs)[:2]

    return _step(devices, implementation, block, lambda rows: (rows, jnp.zeros(rows.shape[:-1])), w=SQUARE, **gate)


def _branch(rows, p):
    return jnp.tanh(rows @ p["w"].astype(rows.dtype))


def _step(devices, implementation, block, begin, **shapes) -> tuple[Callable, tuple, Mesh]:
    """`step(parameters, rows) -> (parameters, loss)` under `shard_rows`, its abstract arguments, the mesh. The
    implementation "best" is left to the platform."""
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))

    def loss(parameters, rows):
        def layer(carry, p):
            return jax.checkpoint(block)(carry, p), None

        (stream, read), _ = jax.lax.scan(layer, begin(rows), parameters)
        return jnp.mean(stream.astype(jnp.float32) ** 2) + jnp.mean(read.astype(jnp.float32))

    def step(parameters, rows):
        with pallas_kernels.using(None if implementation == "best" else implementation):
            value, gradients = jax.value_and_grad(loss)(parameters, rows)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value

    def like(shape, dtype, spec):
        return Like(shape, dtype, sharding=NamedSharding(mesh, spec))

    parameters = {name: like((LAYERS, *shape), jnp.float32, P()) for name, shape in shapes.items()}
    rows = like((BATCH, TOKENS, WIDTH), jnp.bfloat16, P("data"))
    return shard_rows(step, mesh, P("data")), (parameters, rows), mesh
