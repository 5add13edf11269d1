"""Run the raw Triton kernels of the row ops in Triton's interpreter, against float64. A program of its own,
because TRITON_INTERPRET has to be set before triton is first imported."""

import jax
import jax.numpy as jnp
import numpy as np
import row_oracles
from triton_interpreted import Buffer

from pallas_kernels import add_rms_norm, pallas_triton_rows, review_update, triton_rows
from pallas_kernels.add_rms_norm import block as add_block
from pallas_kernels.add_rms_norm import triton_kernels as add_kernels
from pallas_kernels.review_update import block as review_block
from pallas_kernels.review_update import triton_kernels as review_kernels


def interpreted(kernels):
    """A launcher as `triton_rows.rows_call`, on numpy arrays."""

    def launch(kernel, rows, vectors, *, epsilon):
        n, width = rows[0].shape
        shape = triton_rows.constants(kernel, n, width)
        outputs = [Buffer(np.zeros((n, width), np.float32)) for _ in range(kernel.outputs)]
        sums = [Buffer(np.zeros((shape["PROGRAMS"], width), np.float32)) for _ in range(kernel.sums)]
        jitted = kernels.backward if kernel.sums else kernels.forward
        inputs = [Buffer(np.asarray(x, np.float32)) for x in (*rows, *vectors)]
        jitted[(shape["PROGRAMS"],)](*inputs, *outputs, *sums, EPSILON=epsilon, **shape)
        return tuple(jnp.asarray(x.array) for x in outputs), tuple(jnp.asarray(x.array.sum(0)) for x in sums)

    return launch


def check(op, block, kernels, rows, vectors, epsilon, n, width):
    primals, cotangents = row_oracles.inputs(rows, vectors, n, width, "float32")
    *arrays, gain, scale = primals
    args = (*arrays, scale * gain)
    launch = interpreted(kernels)
    outputs, _ = block.forward(launch, *args, epsilon=epsilon)
    kept = (args[-1], outputs[0]) if rows == 2 else args
    got = (*outputs, *block.backward(launch, kept, cotangents, epsilon=epsilon))
    oracle = lambda *a: op(*a, jnp.float32(1), epsilon=epsilon, implementation="xla")  # noqa: E731
    want, pull = jax.vjp(oracle, *args)
    for a, b in zip(got, (*want, *pull(cotangents)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.sqrt(n))


if __name__ == "__main__":
    pallas_triton_rows.PROGRAMS = 3  # so that a program walks several blocks
    for shape in ((5, 96), (3, 1000), (140, 64)):
        check(add_rms_norm, add_block, add_kernels, 2, 1, 1e-6, *shape)
        check(review_update, review_block, review_kernels, 4, 2, 1e-5, *shape)
        print("agrees on", shape)
