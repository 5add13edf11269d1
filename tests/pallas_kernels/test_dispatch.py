"""Choosing an implementation, and placing rows on a mesh."""

import chex
import jax
import jax.numpy as jnp
import nag_oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tolerance import assert_close

from pallas_kernels import nag_update, row_placement, shard_rows
from pallas_kernels.dispatch import choose, interpreting
from pallas_kernels.nag_update import OP

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
    with pytest.raises(ValueError, match="'reference' stands alone"):
        nag_update(*ARGS, implementation=("reference", "xla"))


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
