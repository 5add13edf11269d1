"""Choosing an implementation, and placing rows on a mesh."""

import functools
import re
import subprocess
import sys
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    add_rms_norm,
    choices,
    dispatch,
    implementations,
    nag_update,
    put_rows,
    review_update,
    row_placement,
    shard_rows,
    take_rows,
    using,
)
from pallas_kernels.dispatch import NAMES, choose
from pallas_kernels.launch import gpu, interpreting, mosaic_gpu, raw_triton, tracing_for
from pallas_kernels.ops import all_ops
from pallas_kernels.ops.nag_update import OP
from tests.pallas_kernels import nag_oracle
from tests.tolerance import assert_close

ARGS = (jnp.ones((4, 64)), jnp.zeros(4), jnp.ones((4, 64)), jnp.ones(4))
TOO_WIDE = tuple(jax.ShapeDtypeStruct((4, 10**6) if i in (0, 2) else (4,), jnp.float32) for i in range(len(ARGS)))


def test_none_takes_the_best_of_every_platform():
    choice = choose(OP, None, *ARGS)
    assert [choice.on(p) for p in ("cpu", "tpu", "cuda")] == ["xla", "mosaic_tpu", "pallas_triton"]


def test_a_sequence_is_tried_in_order():
    choice = choose(OP, ("xla", "mosaic_tpu"), *ARGS)
    assert choice.on("tpu") == "xla"
    choice = choose(OP, ("mosaic_tpu", "xla"), *TOO_WIDE)
    assert choice.on("tpu") == "xla" and "mosaic_tpu: D = 1000000" in choice.reasons


def test_refusals_are_raised_together():
    with pytest.raises(ValueError, match=r"mosaic_tpu: D = 1000000.*; pallas_triton: D = 1000000; accepted"):
        choose(OP, ("mosaic_tpu", "pallas_triton"), *TOO_WIDE)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown implementation 'cudnn'; there are reference, mosaic_tpu"):
        nag_update(*ARGS, implementation="cudnn")
    with pytest.raises(ValueError, match="'reference' must be given alone"):
        nag_update(*ARGS, implementation=("reference", "xla"))


def test_names_to_try_may_be_those_of_other_ops():
    """One `using` covers ops with unlike implementations; what no op has is an error, and so is one name alone."""
    with using(("composed", "xla")):
        assert jnp.array_equal(nag_update(*ARGS)[0], nag_update(*ARGS, implementation="xla")[0])
    with pytest.raises(ValueError, match="unknown implementation 'composed'; there are reference, mosaic_tpu"):
        nag_update(*ARGS, implementation="composed")
    with pytest.raises(ValueError, match="unknown implementation 'compose'"):
        nag_update(*ARGS, implementation=("compose", "xla"))
    with pytest.raises(ValueError, match=r"implementation = \('composed',\); give at least one of reference"):
        nag_update(*ARGS, implementation=("composed",))


def test_every_name_of_every_op_is_known():
    assert {name for op in all_ops().values() for name in op.implementations} == set(NAMES)


def test_no_rows_are_no_launch():
    """A grid of no blocks is an error in the kernels, also in those of platforms that the program is not run on."""
    empty = tuple(x[:0] for x in ARGS)
    for implementation in (None, "xla"):
        update = functools.partial(nag_update, implementation=implementation)
        (direction, log_norm), pull = jax.vjp(update, *empty)
        assert direction.shape == (0, 64) and log_norm.shape == (0,)
        assert [g.shape for g in pull((direction, log_norm))] == [x.shape for x in empty]
    kept = put_rows(ARGS[0][None], ARGS[0][None, :0], jnp.zeros((1, 0), jnp.int32))
    assert jnp.array_equal(kept, ARGS[0][None])


def test_arrays_of_numpy_are_taken_as_jax_takes_them():
    """Its numbers are float64 and int64 unless told otherwise; inside jit they always were float32 and int32."""
    wide = tuple(np.asarray(x, np.float64) for x in ARGS)
    direction, log_norm = nag_update(*wide)
    assert direction.dtype == log_norm.dtype == jnp.float32
    gradients = jax.grad(lambda *args: add_rms_norm(*args)[1].sum(), (0, 2))(wide[0], wide[2], np.ones(64))
    assert [g.dtype for g in gradients] == [jnp.float32, jnp.float32]
    assert jnp.array_equal(take_rows(wide[0], np.array([2, 0])), ARGS[0][:2])


def test_what_is_no_array_is_named():
    with pytest.raises(ValueError, match=r"nag_update: turn = 0\.1; accepted: an array \[\.\.\.\]"):
        nag_update(*ARGS[:3], 0.1)
    with pytest.raises(ValueError, match=r"implementation = \(\); give at least one of reference, mosaic_tpu"):
        nag_update(*ARGS, implementation=())
    with pytest.raises(ValueError, match=r"nag_update: unknown implementation 3; there are reference, mosaic_tpu"):
        nag_update(*ARGS, implementation=3)
    with pytest.raises(ValueError, match=r"direction = float8_e4m3fn\[4, 64\]; accepted: a floating dtype"):
        nag_update(ARGS[0].astype(jnp.float8_e4m3fn), *ARGS[1:])
    for scale in (None, "x", 1j, np.array("x")):
        told = r"str32\[\]" if isinstance(scale, np.ndarray) else re.escape(repr(scale))
        for name, op, rows in (("add_rms_norm", add_rms_norm, 2), ("review_update", review_update, 4)):
            weights = [jnp.ones(64)] * (rows // 2)
            with pytest.raises(ValueError, match=f"{name}: scale = {told}; accepted: a number"):
                op(*ARGS[:1] * rows, *weights, scale)


def test_float64_is_for_rows_of_float64():
    """Beside float32 rows the platforms' programs would differ in the dtype of what they return."""
    with jax.enable_x64(True):
        r, s, u, t = (jnp.asarray(np.asarray(x), jnp.float32) for x in ARGS)
        with pytest.raises(ValueError, match=r"log_norm = float64.*accepted: float32"):
            nag_update(r, s.astype(jnp.float64), u, t)
        with pytest.raises(ValueError, match=r"turn = float64.*accepted: float32"):
            nag_update(r, s, u, t.astype(jnp.float64))
        wide = [x.astype(jnp.float64) for x in (r, s, u, t)]
        assert {x.dtype for x in nag_update(*wide)} == {jnp.dtype("float64")}
        with pytest.raises(ValueError, match=r"rows = float64.*accepted: float32"):
            put_rows(r, r[:1].astype(jnp.float64), jnp.zeros(1, jnp.int32))


def test_mosaic_gpu_is_for_servers_blackwell(monkeypatch):
    for capability, accepted in (("8.9", False), ("9.0", True), ("10.3", True), ("12.0", False)):
        device = types.SimpleNamespace(device_kind="Some GPU", compute_capability=capability)
        with monkeypatch.context() as patched:
            patched.setattr(gpu, "traced_gpus", lambda device=device: [device])
            assert (mosaic_gpu.unavailable("cuda") is None) == accepted


def test_rows_without_features_are_no_launch():
    direction, log_norm = nag_update(jnp.ones((4, 0)), ARGS[1], jnp.ones((4, 0)), ARGS[3])
    assert direction.shape == (4, 0) and log_norm.shape == (4,) and choices(4, 0)


def test_a_second_derivative_of_kernels_is_refused_in_words():
    loss = lambda x, **how: nag_update(x, *ARGS[1:], **how)[0].sum()  # noqa: E731
    product = lambda **how: jax.jvp(jax.grad(functools.partial(loss, **how)), ARGS[:1], ARGS[:1])[1]  # noqa: E731
    again = lambda x, _: (jnp.sin(nag_update(x, ARGS[1], jnp.sin(x), ARGS[3])[0]), None)  # noqa: E731
    looped = lambda x: jax.lax.scan(again, x, length=2)[0].sum()  # noqa: E731
    for call in (
        product,
        lambda: jax.hessian(loss)(ARGS[0]),
        lambda: jax.grad(lambda x: jax.grad(loss)(x).sum())(ARGS[0]),
        lambda: jax.grad(lambda x: jax.grad(looped)(x).sum())(ARGS[0]),
    ):
        with pytest.raises(NotImplementedError, match=r"nag_update: its kernels have no second derivative; .*'xla'"):
            call()
    assert jnp.all(jnp.isfinite(product(implementation="xla")))


@pytest.mark.parametrize("forced,elsewhere", [("mosaic_tpu", "cuda"), ("pallas_triton", "tpu"), ("mosaic_tpu", "cpu")])
def test_forced_on_the_wrong_platform(lower, forced, elsewhere):
    with pytest.raises(ValueError, match=f"nag_update: no implementation left. {forced}: runs on .* only"):
        lower(elsewhere, lambda *a: nag_update(*a, implementation=forced), *ARGS)


def test_forced_on_the_wrong_platform_without_jit():
    with pytest.raises(ValueError, match="mosaic_tpu: runs on tpu only"):
        nag_update(*ARGS, implementation="mosaic_tpu")


def test_interpreting_lifts_the_platform_and_ends_with_its_block():
    with interpreting(True):
        assert choose(OP, "pallas_triton", *ARGS).on("cpu") == "pallas_triton"
    assert choose(OP, "pallas_triton", *ARGS).on("cpu") is None


@pytest.mark.parametrize(("platform", "kernels"), [(None, True), ("cpu", False), ("tpu", True), ("rocm", True)])
def test_a_program_for_one_platform_holds_no_other_s_branches(platform, kernels):
    """But on an AMD GPU, whose branch is told from CUDA's when the program is lowered."""
    with tracing_for(platform):
        text = str(jax.make_jaxpr(lambda *a: nag_update(*a))(*ARGS))
    assert ("platform_index" in text) == (platform in (None, "rocm"))
    assert ("pallas_call" in text) == kernels


def test_steps_are_traced_once():
    step = jax.jit(chex.assert_max_traces(lambda *a: nag_update(*a), n=1))
    for _ in range(3):
        step(*ARGS)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_sharded_rows_need_no_communication(kind):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    primals, cotangents = nag_oracle.inputs(16, 96, "float32")
    want = nag_oracle.with_gradients(nag_update, primals, cotangents)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2)

    def step(primals, cotangents):
        outputs, pull = jax.vjp(jax.checkpoint(nag_update), *primals)
        return [*outputs, *pull(cotangents)]

    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("data"))
        args = jax.device_put((primals, cotangents), rows)
        compiled = jax.jit(shard_rows(step, mesh, "data")).lower(*args).compile()
        got = compiled(*args)
    assert_close(jax.device_get(got), jax.device_get(want), terms=96, chain=4)
    text = compiled.as_text()
    assert not any(name in text for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute"))


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("platform,call", [("tpu", "tpu_custom_call"), ("cuda", "xla.gpu.triton")])
def test_kernels_lower_on_a_mesh(kind, platform, call):
    device = {
        "tpu": jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu"),
        "cuda": jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu"),
    }[platform]
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "tensor"), (kind,) * 2, abstract_device=device)
    rows = NamedSharding(mesh, P("data"))
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows) for x in ARGS]
    with jax.sharding.use_abstract_mesh(mesh), row_placement(mesh, P("data")):
        text = jax.jit(nag_update).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(call) == 1


def test_placement_is_inert_inside_shard_map_and_without_a_mesh():
    assert shard_rows(nag_update, None, P("data")) is nag_update
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    primals, _ = nag_oracle.inputs(16, 96, "float32")
    inner = jax.shard_map(nag_update, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    got = jax.jit(shard_rows(inner, mesh, P("data")))(*primals)
    assert_close(jax.device_get(got), jax.device_get(nag_update(*primals)), terms=96, chain=2)


def test_unknown_axis_is_named():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"no axis \['rows'\] in the mesh, whose axes are \('data',\)"):
        shard_rows(nag_update, mesh, P("rows"))
    with pytest.raises(ValueError, match="rows = None: give the name of a mesh axis"):
        shard_rows(nag_update, mesh, None)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_that_a_mesh_does_not_divide_are_named(kind):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind, kind))
    told = r"nag_update: 4 rows do not divide over data=2 x fsdp=4; pad them"
    with pytest.raises(ValueError, match=told):
        jax.jit(shard_rows(lambda *args: nag_update(*args), mesh, P(("data", "fsdp"))))(*ARGS)


def on_device(kind, platform="gpu"):
    device = jax.sharding.AbstractDevice(kind, None, platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


NEW = "NVIDIA A100-SXM4-40GB", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA B200", "NVIDIA GB200", "NVIDIA L4"
NEW += "NVIDIA L40S", "NVIDIA A10G", "NVIDIA RTX A6000", "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3"
NEW += ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 4000 SFF Ada Generation")
OLD = "Tesla T4", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 2080 Ti", "Quadro RTX 6000", "NVIDIA Foo 9000"


@pytest.mark.parametrize("kind", NEW + OLD)
def test_gpus_too_old_or_unknown_are_left_to_xla(monkeypatch, kind):
    with on_device(kind):
        choice = choose(OP, None, *ARGS)
    assert choice.on("cuda") == ("pallas_triton" if kind in NEW else "xla")
    if kind in OLD:
        assert f"pallas_triton: {kind} is not known to have compute capability 8.0" in choice.reasons
        with on_device(kind), monkeypatch.context() as patched:
            patched.setattr(raw_triton, "missing", lambda: None)
            assert "compute capability 8.0" in raw_triton.unavailable("cuda")


@pytest.mark.parametrize("capability, chosen", [("7.5", "xla"), ("8.0", "pallas_triton"), ("12.0", "pallas_triton")])
def test_the_capability_of_the_device_at_hand_decides(monkeypatch, capability, chosen):
    device = types.SimpleNamespace(
        device_kind="Some GPU", compute_capability=capability, client=types.SimpleNamespace(platform_version="cuda 13")
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    choice = choose(OP, None, *ARGS)
    assert choice.on("cuda") == chosen
    assert ("Some GPU has compute capability 7.5; accepted: 8.0" in choice.reasons) == (chosen == "xla")
    assert ("cuda" in choice.passed_over) == (chosen == "xla")


def test_programs_fit_amd_s_limit_of_threads():
    """A wave has 64 lanes and a program 1024 threads: 32 warps on NVIDIA are 16 on AMD."""
    row, gain = jax.ShapeDtypeStruct((64, 8192), "bfloat16"), jax.ShapeDtypeStruct((8192,), jnp.float32)
    with using("pallas_triton"):
        wide = str(jax.make_jaxpr(add_rms_norm)(row, row, gain))
        narrow = [jax.ShapeDtypeStruct((*x.shape[:-1], 4096), x.dtype) for x in (row, row, gain)]
        assert "num_warps=32" not in str(jax.make_jaxpr(add_rms_norm)(*narrow))
    assert sorted(re.findall(r"num_warps=(\d+)", wide)) == ["16", "32"]
    with tracing_for("rocm"):
        assert all(gpu.warps(n, d, 8, 32) * 64 <= 1024 for n in (1, 1024) for d in (64, 2048, 8192, 16384))


def test_what_is_chosen_and_refused_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_said", set())
    with caplog.at_level("INFO", logger="pallas_kernels"):
        for _ in range(2):
            nag_update(*ARGS)
            put_rows(jnp.ones((4, 64)), jnp.ones((1, 64)), jnp.zeros((1,), jnp.int32))
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("nag_update: xla on cpu, mosaic_tpu on tpu, pallas_triton on cuda, pallas_triton on rocm.")
    assert "mosaic_tpu: runs on tpu only" in first and second.startswith("put_rows: ")
    assert {record.levelname for record in caplog.records} == {"INFO"}
    monkeypatch.setattr(dispatch, "here", lambda: "tpu")
    with caplog.at_level("INFO", logger="pallas_kernels"):
        jax.eval_shape(nag_update, *TOO_WIDE)
    assert caplog.records[-1].levelname == "WARNING" and "mosaic_tpu: D = 1000000" in caplog.records[-1].getMessage()


def test_the_table_has_every_op_and_every_reason():
    rows = {row.op: row for row in choices(64, 8192, "float32")}
    assert set(rows) == set(all_ops())
    modulated = rows["nag_update_modulated"]
    assert modulated.chosen == {"cpu": "xla", "tpu": "mosaic_tpu", "cuda": "composed", "rocm": "composed"}
    assert modulated.refusals["pallas_triton"].startswith("D = 8192; accepted: up to 4096")
    with using("reference"):
        assert {name for row in choices() for name in row.chosen.values()} == {"reference"}
    text = implementations.table(64, 8192, "float32")
    assert "nag_update_modulated" in text and "pallas_triton: D = 8192; accepted: up to 4096" in text


GONE = """
import sys
import pallas_kernels
print("imported:", {"triton", "jax_triton", "jax.experimental.pallas.triton"} & set(sys.modules))
sys.modules["jax.experimental.pallas.triton"] = None  # as if JAX had dropped it
import logging, warnings
import jax, jax.numpy as jnp
warnings.simplefilter("error", DeprecationWarning)
logging.basicConfig(level="INFO", stream=sys.stdout)
from pallas_kernels import choices, nag_update
found = choices()
assert len(found) >= 7 and all(row.chosen[p] == "xla" for row in found for p in ("cpu", "rocm")), found
assert all(row.chosen["cuda"] == "mosaic_gpu" for row in found), found
assert all("has no Pallas-Triton" in row.refusals["pallas_triton"] for row in found), found
rows, ones = jnp.ones((4, 64)), jnp.ones(4)
assert jnp.isfinite(nag_update(rows, ones, rows, ones)[0]).all()
text = jax.jit(nag_update).trace(rows, ones, rows, ones).lower(lowering_platforms=("cuda",)).as_text()
assert "triton" not in text
try:
    nag_update(rows, ones, rows, ones, implementation="pallas_triton")
except ValueError as error:
    print("refused:", error)
"""


def test_without_pallas_triton_which_is_not_imported_with_the_package_others_take_over_and_say_why():
    done = subprocess.run([sys.executable, "-c", GONE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "imported: set()" in done.stdout  # nothing optional
    assert "INFO:pallas_kernels:nag_update: xla on cpu, mosaic_tpu on tpu, xla on cuda" in done.stdout
    assert "refused: nag_update: no implementation left. pallas_triton: " in done.stdout


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_sums_over_float64_rows_are_float64(implementation):
    with jax.enable_x64(True):
        noise = np.random.default_rng(0)
        stream, update, cotangent = (jnp.asarray(noise.normal(size=(64, 16))) for _ in range(3))

        def loss(gain):
            normed = add_rms_norm(stream, update, gain, epsilon=1e-6, implementation=implementation)[1]
            return jnp.sum(normed * cotangent)

        found = jax.grad(loss)(jnp.ones(16, jnp.float64))
        total = np.asarray(stream + update)
        exact = np.sum(cotangent * total / np.sqrt(np.mean(total**2, -1, keepdims=True) + 1e-6), 0)
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, exact, rtol=1e-12)
