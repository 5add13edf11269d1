"""Run the raw Triton kernels in Triton's interpreter and compare: `python triton_interpreted.py KERNELS`. A program of
its own, because TRITON_INTERPRET has to be set before triton is first imported."""

import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.launch import gpu, raw_triton
from pallas_kernels.ops import all_ops
from pallas_kernels.ops import nag_update_modulated_gpu as modulated_gpu
from tests.pallas_kernels import nag_oracle, row_oracles
from tests.pallas_kernels import test_nag_update_modulated as modulated_tests

STEPS = {name: op.implementations["triton"] for name, op in all_ops().items()}


class Buffer:
    """A numpy array with the few methods by which Triton's interpreter reads and writes its arguments."""

    def __init__(self, array):
        self.array, self.dtype = np.array(array), np.asarray(array).dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    cpu = untyped_storage

    def new_empty(self, *_, **__):
        return Buffer.__new__(Buffer)

    def set_(self, storage, *_):
        self.array, self.dtype = storage.array, storage.dtype

    def copy_(self, other):
        self.array[...] = other.array

    def storage_offset(self):
        return 0

    size = stride = storage_offset


def call(kernel, inputs, like, name, *, grid, warps, **constants):
    """As `raw_triton.call`."""
    buffers = [Buffer(x[...]) for x in inputs]
    outs = [Buffer(np.full(x.shape, np.nan, x.dtype)) for x in like]
    kernel[(grid,)](*buffers, *outs, **constants)
    for x, buffer in zip(inputs, buffers, strict=True):
        if not isinstance(x, jax.Array):  # a reference, which the kernel writes into
            x[...] = buffer.array
    return [jnp.asarray(x.array) for x in outs]


def check_nag_update(n, d):
    primals, cotangents = nag_oracle.inputs(n, d, "float32")
    (out, s_out), _ = STEPS["nag_update"].forward(*primals)
    gradients = STEPS["nag_update"].backward([primals[i] for i in (0, 2, 3)], cotangents)
    names = ("direction", "log_norm", "d_direction", "d_log_norm", "d_update", "d_turn")
    want = nag_oracle.exact(nag_oracle.update, primals, cotangents)
    nag_oracle.assert_close(names, [out, s_out, *gradients], want, d)


def check_modulated(n, d):
    primals, cotangents = modulated_tests.inputs(n, d, "float32")
    step = STEPS["nag_update_modulated"]
    outputs, _ = step.forward(*primals)
    residuals = [primals[0], *primals[2:]]
    got = [*outputs, *step.backward(residuals, cotangents)]
    modulated_tests.assert_each_close(got, nag_oracle.exact(modulated_tests.oracle, primals, cotangents), d, "float32")
    # As for bfloat16 rows: the weight in two parts, forward their sum, backward the first; the gradient in two.
    wide, *others = modulated_gpu._on_chip(*primals[3:], jnp.float32)
    parts = {"forward": jnp.concatenate([0.75 * wide, 0.25 * wide]), "backward": jnp.concatenate([wide, 0 * wide])}
    with mock.patch.object(modulated_gpu, "halves", lambda dtype: 2):
        with mock.patch.object(modulated_gpu, "_on_chip", lambda *_: (parts["forward"], *others)):
            np.testing.assert_allclose(step.forward(*primals)[0][2], outputs[2], rtol=1e-6)
        with mock.patch.object(modulated_gpu, "_on_chip", lambda *_: (parts["backward"], *others)):
            gradients = step.backward(residuals, cotangents)
    for a, b in zip(gradients, got[3:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def check_rows(n, d):
    random = np.random.default_rng(n)
    x, indices = jnp.asarray(random.standard_normal((n, d)), jnp.float32), random.permutation(n)[: n // 2 + 1]
    indices = jnp.asarray(indices, jnp.int32)
    np.testing.assert_array_equal(raw_triton.take(x, indices), x[indices])
    rows = -x[: indices.size]
    np.testing.assert_array_equal(raw_triton.put(x, rows, indices), x.at[indices].set(rows))


def check_row_kernels(name, rows, vectors, epsilon):
    op = all_ops()[name]

    def check(n, width):
        gpu.PROGRAMS = 3  # so that a program walks several blocks
        primals, cotangents = row_oracles.inputs(rows, vectors, n, width, "float32")
        *arrays, gain, scale = primals
        args = (*arrays, scale * gain)
        outputs, _ = STEPS[name].forward(*args, epsilon=epsilon)
        kept = [args[i] for i in op.keep_inputs] + [outputs[i] for i in op.keep_outputs]
        got = (*outputs, *STEPS[name].backward(kept, cotangents, epsilon=epsilon))
        oracle = lambda *a: op.reference(*a, epsilon=epsilon)  # noqa: E731
        want, pull = jax.vjp(oracle, *args)
        for a, b in zip(got, (*want, *pull(cotangents)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.sqrt(n))

    return check


CHECKS = {
    "nag_update": check_nag_update,
    "nag_update_modulated": check_modulated,
    "rows": check_rows,
    "add_rms_norm": check_row_kernels("add_rms_norm", 2, 1, 1e-6),
    "review_update": check_row_kernels("review_update", 4, 2, 1e-5),
}

if __name__ == "__main__":
    raw_triton.call = call
    for shape in ((5, 96), (3, 1000), (140, 64)):
        CHECKS[sys.argv[1]](*shape)
        print("agrees on", shape)
