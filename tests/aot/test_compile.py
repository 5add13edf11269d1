"""A limit of the real compilers, and what they must not leave out. Needs the wheels of the `aot` extra; `make aot`
checks that kernels keep to the limits."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot.cases import TABLE, Case
from pallas_kernels.aot.report import KERNELS
from pallas_kernels.aot.targets import ENVIRONMENT, TARGETS, devices, missing
from pallas_kernels.bench import with_gradients
from pallas_kernels.dispatch import run
from pallas_kernels.ops import all_ops
from pallas_kernels.ops.modulator import split
from pallas_kernels.shapes import sample


@pytest.fixture
def target(request, monkeypatch):
    """The target that the test names, with the environment in which its compiler runs."""
    found = TARGETS[request.param]
    if reason := missing(found):
        pytest.skip(reason)
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    return found


@pytest.mark.parametrize("target", ["v5e"], indirect=True)
def test_a_block_beyond_the_chip_is_refused_by_its_compiler(target, monkeypatch):
    """The compiler itself checks that a program fits: a larger memory budget than the chip's ends in its error."""
    from pallas_kernels.aot.worker import compile_case
    from pallas_kernels.launch import tpu

    monkeypatch.setattr(tpu, "VMEM_BYTES", 2**30)
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)vmem"):
        compile_case(Case("review_update", "mosaic_tpu", "backward", *TABLE[1]), target, devices(target))


def _halves(x):
    return split(x.astype(jnp.float32))


def _of_op(name, implementation):
    return lambda x: run(all_ops()[name], implementation, *ARGUMENTS[name](x, jnp.ones(x.shape[-1:])), epsilon=1e-6)


ARGUMENTS = {"add_rms_norm": lambda x, one: (x, x, one), "review_update": lambda x, one: (x, x, x, x, one, one)}
OPS = [_of_op(name, implementation) for name in ARGUMENTS for implementation in ("xla", "reference")]


@pytest.mark.parametrize("program", [_halves, *OPS])
@pytest.mark.parametrize("target", ["v5e", "h200"], indirect=True)
def test_a_rounding_between_two_computations_is_in_the_program(target, program):
    """Compilers leave out a conversion and its reverse."""
    x = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(devices(target)[0]))
    lowered = jax.jit(program).trace(x).lower(lowering_platforms=(target.platform,))
    assert "reduce-precision" in lowered.compile().as_text()


@pytest.mark.parametrize("target", ["t4"], indirect=True)
def test_attention_in_bfloat16_compiles_for_a_gpu_that_has_no_units_for_it(target):
    from nagjax.layers.attend import attend
    from nagjax.layers.platform import tracing_for
    from nagjax.layers.where import Where

    mesh = jax.sharding.Mesh(devices(target)[:1], ("one",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P()))

    def step(q, k, v):
        where = Where.whole(*q.shape[:2])
        return jax.grad(lambda *qkv: jnp.sum(attend(*qkv, where, where).astype(jnp.float32)), (0, 1, 2))(q, k, v)

    with jax.set_mesh(mesh), tracing_for("gpu"):
        compiled = jax.jit(step).trace(x, x, x).lower(lowering_platforms=("cuda",)).compile()
    assert all(out.dtype == jnp.bfloat16 for out in compiled.out_info)


@pytest.mark.parametrize("name", ["add_rms_norm", "nag_update", "review_update"])
@pytest.mark.parametrize("width", [640, 4096])
def test_the_shared_memory_that_mosaic_gpu_takes_is_what_is_planned(name, width, monkeypatch):
    """For one warpgroup to a row, and for several."""
    from jax.experimental.mosaic.gpu import core

    from pallas_kernels.launch import mosaic_gpu

    asked, launch = [], core._launch

    def counted(token, grid, cluster, block, buffers, *rest, **more):
        asked.append(core._smem_tree_size(buffers))
        return launch(token, grid, cluster, block, buffers, *rest, **more)

    monkeypatch.setattr(core, "_launch", counted)
    op, of = all_ops()[name], sample(name, 1024, width, "bfloat16")
    step = functools.partial(with_gradients, functools.partial(run, op, "mosaic_gpu", **of.constants))
    h200 = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=h200)):
        jax.jit(step).trace(of.args, jax.eval_shape(op.reference, *of.args, **of.constants)).lower(
            lowering_platforms=("cuda",)
        )
    planned = [mosaic_gpu.launched(kernel, 1024, width, "bfloat16").shared for kernel in KERNELS[name]]
    assert asked == planned


@pytest.mark.parametrize("op", ["add_rms_norm", "review_update"])
@pytest.mark.parametrize("target", ["mi300"], indirect=True)
def test_a_kernel_for_amd_compiles(op, target):
    from pallas_kernels.aot.worker import compile_case

    found = compile_case(Case(op, "pallas_triton", "backward", 1024, 1000, "float32"), target, [])
    assert found["problems"] == [] and 0 < found["registers"] <= 256 and found["spilled"] == 0
