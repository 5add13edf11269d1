"""The row kernels on Mosaic GPU, in its interpreter: values and gradients against float64, races, refusals."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import add_rms_norm, nag_update, review_update
from pallas_kernels.dispatch import choose
from pallas_kernels.launch import gpu, interpreting, mosaic_gpu
from pallas_kernels.ops import all_ops
from pallas_kernels.ops.add_rms_norm import BACKWARD, FORWARD
from pallas_kernels.shapes import sample
from tests.jaxprs import equations
from tests.pallas_kernels import nag_oracle, row_oracles

H200 = AbstractDevice("NVIDIA H200", 132, "gpu")
# (rows, width, dtype, values of a thread, KiB of shared memory for all programs): one step; narrow rows that share a
# step; several steps for a program, more than its ring has; rows shared by two warpgroups and more, likewise.
SHAPES = (
    (1, 128, "float32", 128, 228),
    (12, 640, "bfloat16", 128, 228),
    (7, 256, "float32", 128, 16),
    (7, 512, "bfloat16", 16, 24),
    (3, 1024, "float32", 16, 228),
)


@pytest.fixture
def shape(request, monkeypatch):
    *shape, values, kilobytes = request.param
    changes = {"VALUES": values, "SHARED_BYTES": kilobytes * 1024, "MULTIPROCESSORS": 1}
    for name, value in changes.items():
        monkeypatch.setattr(mosaic_gpu, name, value)
    with (
        use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)),
        interpreting(plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")),
    ):
        yield shape


@pytest.mark.parametrize(  # every shape for one of the ops: they share the launcher
    "op, rows, vectors, shape",
    [(add_rms_norm, 2, 1, SHAPES[i]) for i in (0, 2, 4)] + [(review_update, 4, 2, SHAPES[i]) for i in (1, 3)],
    ids=lambda value: getattr(value, "__name__", str(value)),
    indirect=["shape"],
)
def test_values_and_gradients_with_sums(op, rows, vectors, shape):
    name = op.__name__
    primals, cotangents = row_oracles.inputs(rows, vectors, *shape)
    call = functools.partial(op, implementation="mosaic_gpu")
    row_oracles.compare(getattr(row_oracles, name), {"mosaic_gpu": call}, primals, cotangents)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str, indirect=True)
def test_nag_update(shape):
    primals, cotangents = nag_oracle.inputs(*shape)
    call = functools.partial(nag_update, implementation="mosaic_gpu")
    got = nag_oracle.with_gradients(call, primals, cotangents)
    names = ("direction", "log_norm", "d_direction", "d_log_norm", "d_update", "d_turn")
    nag_oracle.assert_close(names, got, nag_oracle.exact(nag_oracle.update, primals, cotangents), shape[1])


def sums(jaxpr) -> int:
    return sum(e.primitive.name == "reduce_sum" for e in equations(jaxpr))


@pytest.mark.parametrize("shape", SHAPES[3:], ids=str, indirect=True)
def test_warpgroups_sum_one_after_the_other(shape):
    """Mosaic reduces through one scratch for all warpgroups, which the interpreter does not have."""
    rows, width, dtype = shape
    x, gain = jax.ShapeDtypeStruct((rows, width), dtype), jax.ShapeDtypeStruct((width,), jnp.float32)
    call = functools.partial(add_rms_norm, implementation="mosaic_gpu")
    traced = jax.make_jaxpr(call)(x, x, gain).jaxpr
    (kernel,) = (e.params["jaxpr"] for e in equations(traced) if e.primitive.name == "run_scoped")
    turns = [sums(b.jaxpr) for e in equations(kernel) if e.primitive.name == "cond" for b in e.params["branches"]]
    assert max(turns) == 1 and sum(turns) == sums(kernel) == mosaic_gpu.warpgroups(FORWARD, width) > 1


@pytest.mark.parametrize("chosen", ["mosaic_gpu", None])
def test_lowers_to_its_kernel_and_is_the_next_best(lower, chosen, monkeypatch):
    """Without Pallas-Triton, which JAX will drop, it is taken before XLA."""
    monkeypatch.setattr(gpu, "_triton", _gone)
    primals, cotangents = nag_oracle.inputs(9, 640, "bfloat16")
    step = functools.partial(nag_oracle.with_gradients, functools.partial(nag_update, implementation=chosen))
    assert lower("cuda", step, primals, cotangents).count("mosaic_gpu_v2") == 2


def _gone():
    raise ImportError("cannot import triton")


@pytest.mark.parametrize(
    "op, width, dtype, words",
    [
        ("add_rms_norm", 1000, "bfloat16", "D = 1000; accepted: multiples of 128"),
        ("review_update", 8192, "bfloat16", "D = 8192: a row does not fit into the registers of 4 warpgroups"),
        ("add_rms_norm", 10240, "float32", "D = 10240: 2 steps exceed the 228 KiB of shared memory"),
        ("nag_update", 640, "float64", "float64 rows; accepted: float32"),
        ("nag_update_rows", 1000, "bfloat16", "D = 1000; accepted: multiples of 128"),
        ("nag_update_modulated", 1000, "bfloat16", "D = 1000; accepted: multiples of 128"),
    ],
)
def test_refusals_name_the_reason(op, width, dtype, words):
    with jax.enable_x64(True):
        of = sample(op, 64, width, dtype)
    with pytest.raises(ValueError, match=words):
        choose(all_ops()[op], "mosaic_gpu", *of.args, **of.constants)


def test_rows_by_index_are_refused_by_their_width_and_not_their_number():
    of = sample("nag_update_rows", 2**22, 128, "bfloat16")
    assert choose(all_ops()["nag_update_rows"], "mosaic_tpu", *of.args).on("tpu") == "mosaic_tpu"
    of = sample("nag_update_rows", 64, 2**20, "bfloat16")
    with pytest.raises(ValueError, match="mosaic_tpu: D = 1048576: 16 rows exceed 12 MiB"):
        choose(all_ops()["nag_update_rows"], "mosaic_tpu", *of.args)


@pytest.mark.parametrize("kind, runs", [("NVIDIA H100 PCIe", True), ("NVIDIA GB200", True), ("NVIDIA A100", False)])
def test_needs_hopper_or_newer(kind, runs):
    of = sample("nag_update", 64, 640, "bfloat16")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "gpu"))):
        if runs:
            assert choose(all_ops()["nag_update"], "mosaic_gpu", *of.args).on("cuda") == "mosaic_gpu"
            return
        with pytest.raises(ValueError, match="NVIDIA A100 is not known to have compute capability 9.0 or newer"):
            choose(all_ops()["nag_update"], "mosaic_gpu", *of.args)


@pytest.mark.parametrize("width", (128, 640, 1024, 2048, 4096, 8192))
@pytest.mark.parametrize("n", (1, 7, 1000, 16384))
def test_every_row_has_one_place(n, width):
    """Steps cover the rows exactly, parts the columns, and what is resident fits a multiprocessor."""
    for kernel in (BACKWARD, FORWARD):
        plan = mosaic_gpu.plan(kernel, n, width, jnp.bfloat16)
        assert plan.steps * plan.rows == n and plan.groups * plan.part[0] * plan.part[1] == width
        assert plan.part[1] <= 256 and plan.part[0] <= 256 and plan.programs <= plan.steps
        shared = mosaic_gpu.launched(kernel, n, width, jnp.bfloat16).shared
        assert plan.stages >= 2 and plan.resident * (shared + 1024) <= 228 * 1024  # CUDA takes 1024 for every program
