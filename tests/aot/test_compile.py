"""A limit of the real compilers, and what they must not leave out. Needs the wheels of the `aot` extra; `make aot`
checks that kernels keep to the limits."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot.cases import TABLE, Case
from pallas_kernels.aot.targets import TARGETS, missing
from pallas_kernels.ops.modulator import split


@pytest.mark.parametrize("name", ["v5e"])
def test_a_block_beyond_the_chip_is_refused_by_its_compiler(name, monkeypatch):
    """The compiler itself checks that a program fits: a larger memory budget than the chip's ends in its error."""
    target = TARGETS[name]
    if reason := missing(target):
        pytest.skip(reason)
    from pallas_kernels.aot.targets import ENVIRONMENT, devices
    from pallas_kernels.aot.worker import compile_case
    from pallas_kernels.launch import tpu

    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(tpu, "VMEM_BYTES", 2**30)
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)vmem"):
        compile_case(Case("review_update", "mosaic_tpu", "backward", *TABLE[1]), target, devices(target))


@pytest.mark.parametrize("name", ["v5e", "h200"])
def test_the_rounding_between_two_halves_is_in_the_program(name, monkeypatch):
    target = TARGETS[name]
    if reason := missing(target):
        pytest.skip(reason)
    from pallas_kernels.aot.targets import ENVIRONMENT, devices

    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(devices(target)[0]))
    lowered = jax.jit(split).trace(x).lower(lowering_platforms=(target.platform,))
    assert "reduce-precision" in lowered.compile().as_text()


@pytest.mark.parametrize("op", ["add_rms_norm", "review_update"])
def test_a_kernel_for_amd_compiles(op):
    target = TARGETS["mi300"]
    if reason := missing(target):
        pytest.skip(reason)
    from pallas_kernels.aot.worker import compile_case

    found = compile_case(Case(op, "pallas_triton", "backward", 1024, 1000, "float32"), target, [])
    assert found["problems"] == [] and 0 < found["registers"] <= 256 and found["spilled"] == 0
