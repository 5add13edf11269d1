"""A training step for four devices with an op in every block: rows sharded, parameters replicated.

Two scanned blocks with rematerialisation, a squared loss, plain gradient descent. Rows never leave their
device, so the only communication there can be is the sum of the parameters' gradients.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import shard_rows, using
from pallas_kernels.dispatch import run
from pallas_kernels.ops import all_ops
from pallas_kernels.shapes import sample

LAYERS, BATCH, TOKENS, WIDTH = 2, 8, 128, 512


def training_step(name: str, devices: list, implementation: str) -> tuple[Callable, tuple, Mesh]:
    """`step(parameters, rows) -> (parameters, loss)` under `shard_rows`, its abstract arguments, and the mesh.

    A block passes on the sum of its op's `[N, D]` outputs. The op takes these rows, and for each further row argument a
    branch of them (for one float per row, the branch's mean); its other arguments are parameters. With the
    implementation "best" the platform chooses.
    """
    op, of = all_ops()[name], sample(name, BATCH * TOKENS, WIDTH, "bfloat16")
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))

    def block(rows, parameters):
        def argument(trailing: int | None, own):
            if trailing is None:
                return own
            branch = jnp.tanh(rows @ own.astype(rows.dtype))
            return branch if trailing else jnp.mean(branch, axis=-1, dtype=jnp.float32)

        others = (argument(*one) for one in zip(op.inputs[1:], parameters, strict=True))
        outputs = run(op, None, rows, *others, **of.constants)
        wide = [x for x, trailing in zip(outputs, op.outputs, strict=True) if trailing]
        return sum(wide), sum(jnp.mean(x.astype(jnp.float32) ** 2) for x in outputs)

    def step(parameters, rows):
        def loss(parameters):
            return jnp.sum(jax.lax.scan(jax.checkpoint(block), rows, parameters)[1])

        with using(None if implementation == "best" else implementation):
            value, gradients = jax.value_and_grad(loss)(parameters)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value

    def like(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shapes = [x.shape if t is None else (WIDTH, WIDTH) for t, x in zip(op.inputs, of.args, strict=True)][1:]
    parameters = tuple(like((LAYERS, *shape), jnp.float32, P()) for shape in shapes)
    rows = like((BATCH, TOKENS, WIDTH), jnp.bfloat16, P("data"))
    return shard_rows(step, mesh, P("data")), (parameters, rows), mesh
