"""The raw Triton kernels of the row ops: numerics in Triton's own interpreter, lowering through jax_triton."""

import functools
import os
import pathlib
import subprocess
import sys

import pytest
import row_oracles
from kernel_lowering import CUSTOM_CALL

from pallas_kernels import add_rms_norm, raw_triton, review_update


def test_kernels_interpreted():
    pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")
    script = pathlib.Path(__file__).with_name("row_triton_interpreted.py")
    paths = filter(None, (str(script.parents[2]), os.environ.get("PYTHONPATH")))
    env = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees on") == 3


@pytest.mark.parametrize("op, rows, vectors", [(add_rms_norm, 2, 1), (review_update, 4, 2)])
def test_lowers_through_jax_triton(lower, op, rows, vectors):
    primals, cotangents = row_oracles.inputs(rows, vectors, 9, 640, "bfloat16")
    if reason := raw_triton.refusal(stream=primals[0]):
        pytest.skip(reason)
    pytest.importorskip("jax_cuda13_plugin", reason="jax_triton lowers with the CUDA plugin alone")
    step = functools.partial(row_oracles.with_gradients, functools.partial(op, implementation="triton"))
    assert lower("cuda", step, primals, cotangents).count(CUSTOM_CALL["triton"]) == 2
