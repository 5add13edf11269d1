"""Run the raw Triton kernels in Triton's interpreter and compare with float64. A program of its own, because
TRITON_INTERPRET has to be set before triton is first imported."""

import nag_oracle
import numpy as np

from pallas_kernels.nag_update import triton_kernels
from pallas_kernels.nag_update.constants import EPS_NORM, EPS_UPDATE
from pallas_kernels.triton_tile import launch_shape

NAMES = ("direction", "log_norm", "d_direction", "d_log_norm", "d_update", "d_turn")


class Buffer:
    """A numpy array with the few methods by which Triton's interpreter reads and writes its arguments."""

    def __init__(self, array):
        self.array, self.dtype = np.array(array), array.dtype

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


def check(n, d):
    primals, cotangents = nag_oracle.inputs(n, d, "float32")
    r, s, u, t, g, ds = (Buffer(np.asarray(x)) for x in (*primals, *cotangents))
    out, s_out, dr, du, dt = (Buffer(np.zeros_like(primals[i])) for i in (0, 1, 0, 2, 3))
    rows, columns, _ = launch_shape(n, d)
    grid = (-(-n // rows),)
    constants = dict(N=n, D=d, ROWS=rows, COLUMNS=columns, EPS_UPDATE=EPS_UPDATE, EPS_NORM=EPS_NORM)
    triton_kernels.forward[grid](r, s, u, t, out, s_out, **constants)
    triton_kernels.backward[grid](r, u, t, g, ds, dr, du, dt, **constants)
    got = [x.array for x in (out, s_out, dr, ds, du, dt)]
    nag_oracle.assert_close(NAMES, got, nag_oracle.exact(nag_oracle.update, primals, cotangents), d)


if __name__ == "__main__":
    for shape in ((5, 96), (3, 1000), (40, 64)):
        check(*shape)
        print("agrees on", shape)
