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

from pallas_kernels import add_rms_norm as fused_norm
from pallas_kernels import nag_update as turn_towards
from pallas_kernels import nag_update_modulated as modulated
from pallas_kernels import review_update as review
from pallas_kernels import shard_rows

LAYERS, BATCH, TOKENS, WIDTH, GATES = 2, 8, 128, 512, 32


def add_rms_norm(devices: list, implementation: str) -> tuple[Callable, tuple, Mesh]:
    """Pre-norm blocks with LayerNorm Scaling."""

    def block(carry, p):
        stream, normed = carry
        update = jnp.tanh(normed @ p["w"].astype(normed.dtype))
        return fused_norm(stream, update, p["gain"], p["scale"], implementation=implementation)

    return _step(devices, block, lambda rows: (rows, rows), w=(WIDTH, WIDTH), gain=(WIDTH,), scale=())


def review_update(devices: list, implementation: str) -> tuple[Callable, tuple, Mesh]:
    """Review Residuals with the dense gate."""

    def block(carry, p):
        stream, normed = carry
        w, per_state, per_update = (p[k].astype(stream.dtype) for k in ("w", "w_h", "w_u"))
        update = jnp.tanh(normed @ w)
        gates = stream @ per_state, update @ per_update
        return review(stream, update, *gates, p["bias"], p["gain"], implementation=implementation)

    square = (WIDTH, WIDTH)
    shapes = dict(w=square, w_h=square, w_u=square, bias=(WIDTH,), gain=(WIDTH,))
    return _step(devices, block, lambda rows: (rows, rows), **shapes)


def nag_update(devices: list, implementation: str) -> tuple[Callable, tuple, Mesh]:
    """NAG blocks with one learned turn per layer."""

    def block(carry, p):
        direction, log_norm = carry
        update = jnp.tanh(direction @ p["w"].astype(direction.dtype))
        turn = jnp.broadcast_to(p["turn"], log_norm.shape)
        return turn_towards(direction, log_norm, update, turn, implementation=implementation)

    return _step(devices, block, lambda rows: (rows, jnp.zeros(rows.shape[:-1])), w=(WIDTH, WIDTH), turn=())


def nag_update_modulated(devices: list, implementation: str) -> tuple[Callable, tuple, Mesh]:
    """NAG blocks with their modulator."""

    def block(carry, p):
        direction, log_norm = carry
        update = jnp.tanh(direction @ p["w"].astype(direction.dtype))
        gate = (p[k] for k in ("weight", "bias", "logits", "beta", "alpha"))
        outputs = modulated(direction, log_norm, update, *gate, implementation=implementation)
        return outputs[:2]

    gate = dict(weight=(WIDTH, GATES), bias=(GATES,), logits=(GATES,), beta=(), alpha=())
    return _step(devices, block, lambda rows: (rows, jnp.zeros(rows.shape[:-1])), w=(WIDTH, WIDTH), **gate)


def _step(devices, block, begin, **shapes) -> tuple[Callable, tuple, Mesh]:
    """`step(parameters, rows) -> (parameters, loss)` under `shard_rows`, its abstract arguments, the mesh."""
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))

    def loss(parameters, rows):
        def layer(carry, p):
            return jax.checkpoint(block)(carry, p), None

        (stream, read), _ = jax.lax.scan(layer, begin(rows), parameters)
        return jnp.mean(stream.astype(jnp.float32) ** 2) + jnp.mean(read.astype(jnp.float32))

    def step(parameters, rows):
        value, gradients = jax.value_and_grad(loss)(parameters, rows)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value

    def like(shape, dtype, spec):
        return Like(shape, dtype, sharding=NamedSharding(mesh, spec))

    parameters = {name: like((LAYERS, *shape), jnp.float32, P()) for name, shape in shapes.items()}
    rows = like((BATCH, TOKENS, WIDTH), jnp.bfloat16, P("data"))
    return shard_rows(step, mesh, P("data")), (parameters, rows), mesh
