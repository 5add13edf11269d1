"""The raw Triton kernels: numerics in Triton's own interpreter, and lowering through jax_triton."""

import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import nag_oracle
import pytest
from kernel_lowering import CUSTOM_CALL

from pallas_kernels import nag_update, nag_update_modulated, nag_update_rows, raw_triton


def test_kernels_interpreted_against_float64():
    pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")
    script = pathlib.Path(__file__).with_name("triton_interpreted.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    root = str(script.parents[2])
    env["PYTHONPATH"] = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees on") == 3


def modulated(r, s, u, t):
    parameters = jnp.ones((r.shape[1], 4)), jnp.zeros(4), jnp.zeros(4), jnp.float32(1), jnp.float32(1)
    return nag_update_modulated(r, s, u, *parameters, implementation="triton")[:2]


@pytest.mark.parametrize(
    "call",
    [
        lambda *a: nag_update(*a, implementation="triton"),
        lambda *a: nag_update_rows(*a, jnp.arange(9, dtype=jnp.int32), implementation="triton"),
        modulated,
    ],
    ids=["nag_update", "nag_update_rows", "nag_update_modulated"],
)
def test_lowers_through_jax_triton(lower, call):
    primals, cotangents = nag_oracle.inputs(9, 640, "bfloat16")
    refusal = raw_triton.refusal(direction=primals[0])
    if refusal:
        pytest.skip(refusal)
    if importlib.metadata.version("jax-triton").startswith("0.3") and jax.default_backend() != "gpu":
        pytest.skip("jax_triton 0.3 asks the driver what the GPU is")
    pytest.importorskip("jax_cuda13_plugin", reason="jax_triton lowers with the CUDA plugin alone")
    step = functools.partial(nag_oracle.with_gradients, call)
    assert lower("cuda", step, primals, cotangents).count(CUSTOM_CALL["triton"]) == 2


def test_says_what_to_install():
    if importlib.util.find_spec("jax_triton"):
        pytest.skip("jax_triton is installed")
    x = jnp.ones((3, 64))
    with pytest.raises(ValueError, match=r"triton: needs jax_triton: pip install 'nagjax\[triton\]'"):
        jax.jit(lambda x: nag_update(x, x[:, 0], x, x[:, 0], implementation="triton"))(x)
