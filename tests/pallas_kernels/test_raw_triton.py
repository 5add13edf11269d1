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
import pytest

from pallas_kernels import (
    add_rms_norm,
    nag_update,
    nag_update_modulated,
    nag_update_rows,
    put_rows,
    review_update,
    take_rows,
)
from pallas_kernels.launch import raw_triton
from pallas_kernels.ops import all_ops
from tests.pallas_kernels import nag_oracle, row_oracles
from tests.pallas_kernels import test_nag_update_modulated as modulated_tests
from tests.pallas_kernels.kernel_lowering import CUSTOM_CALL

CHOSEN = jnp.arange(0, 9, 2, dtype=jnp.int32)
NAG, ROWS = nag_oracle.inputs(9, 640, "bfloat16"), nag_oracle.inputs(5, 640, "bfloat16")[0]
STEPS = {
    "nag_update": (nag_update, *NAG),
    "nag_update_modulated": (nag_update_modulated, *modulated_tests.inputs(9, 640, "bfloat16")),
    "nag_update_rows": (lambda *a, **k: nag_update_rows(*a, CHOSEN, **k), (*NAG[0][:2], *ROWS[2:]), NAG[1]),
    "take_rows": (lambda x, **k: (take_rows(x, CHOSEN, **k),), NAG[0][:1], (ROWS[0],)),
    "put_rows": (lambda x, r, **k: (put_rows(x, r, CHOSEN, **k),), (NAG[0][0], ROWS[0]), NAG[1][:1]),
    "add_rms_norm": (add_rms_norm, *row_oracles.inputs(2, 1, 9, 640, "bfloat16")),
    "review_update": (review_update, *row_oracles.inputs(4, 2, 9, 640, "bfloat16")),
}
CALLS = {"put_rows": 3}  # forward, and backward a take and a put of zeros; the others are one call each way


FILES = sorted(
    {path.stem for path in pathlib.Path(raw_triton.__file__).parents[1].glob("ops/triton/*.py")} - {"__init__", "tile"}
)


def test_no_op_is_left_out():
    """Triton need not be installed for this one."""
    ops = {name: op for name, op in all_ops().items() if "triton" in op.implementations}
    assert STEPS.keys() == ops.keys(), "add the op to STEPS"
    launched = lambda op: getattr(op.implementations["triton"].forward, "args", ())  # noqa: E731
    lacking = {name for name, op in ops.items() if raw_triton.rows_call in launched(op)} - {*FILES}
    assert not lacking, f"write pallas_kernels/ops/triton/NAME.py of {lacking}"
    source = pathlib.Path(__file__).with_name("triton_interpreted.py").read_text(encoding="utf-8")
    unchecked = [name for name in FILES if f'\n    "{name}": check_' not in source]
    assert not unchecked, f"add to CHECKS in triton_interpreted.py: {unchecked}"


@pytest.mark.parametrize("kernels", FILES)
def test_kernels_interpreted(kernels):
    pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")
    script = pathlib.Path(__file__).with_name("triton_interpreted.py")
    paths = filter(None, (str(script.parents[2]), os.environ.get("PYTHONPATH")))
    env = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(script), kernels]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees on") == 3


@pytest.mark.parametrize("name", STEPS)
def test_lowers_through_jax_triton(lower, name):
    op, primals, cotangents = STEPS[name]
    if refusal := raw_triton.missing():
        pytest.skip(refusal)
    pytest.importorskip("jax_cuda13_plugin", reason="jax_triton lowers with the CUDA plugin alone")
    step = functools.partial(row_oracles.with_gradients, functools.partial(op, implementation="triton"))
    text = lower("cuda", step, primals, cotangents)
    assert text.count(CUSTOM_CALL["triton"]) == CALLS.get(name, 2)
    assert ("output_operand_alias" in text) == (name in ("take_rows", "put_rows"))


@pytest.mark.parametrize(
    ("triton", "words"),
    [("3.6.0", "needs triton 3.7 or newer; this is 3.6"), (None, "this is none"), ("3.7rc1", None), ("3.10.0", None)],
)
def test_a_triton_that_jax_triton_cannot_use_is_refused(monkeypatch, triton, words):
    """It can be imported with an older one, and then compiles nothing."""

    def version(package):
        if package == "triton" and triton is None:
            raise importlib.metadata.PackageNotFoundError
        return {"triton": triton, "jax-triton": "9.0.0"}[package]

    monkeypatch.setattr(raw_triton.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(raw_triton.importlib.metadata, "version", version)
    assert (raw_triton.missing() is None) if words is None else words in raw_triton.missing()


def test_says_what_to_install():
    if importlib.util.find_spec("jax_triton"):
        pytest.skip("jax_triton is installed")
    x = jnp.ones((3, 64))
    with pytest.raises(ValueError, match=r"triton: needs jax_triton: pip install -e '\.\[triton\]'"):
        jax.jit(lambda x: nag_update(x, x[:, 0], x, x[:, 0], implementation="triton"))(x)
