"""Costs read from programs compiled for the CPU, against closed forms; loops count as often as they run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nagjax.model.config import ModelConfig
from nagjax.plan.account import account, group_size, loops
from nagjax.residual import find_scheme
from nagjax.runs.config import MeshConfig, RunConfig, TrainConfig
from nagjax.train.abstract_step import training_step
from pallas_kernels.hlo import parse, parts, size

LAYERS, ROWS, WIDTH = 7, 48, 64


def compiled(fn, *args):
    return account(parse(jax.jit(fn).lower(*args).compile().as_text()), 8)


def layers(weights, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


@pytest.fixture(scope="module")
def arrays():
    return jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))


def test_products_in_a_loop_count_as_often_as_it_runs(arrays):
    assert compiled(layers, *arrays).flops == LAYERS * 2 * ROWS * WIDTH * WIDTH


def test_the_gradient_is_three_products_for_each(arrays):
    gradient = jax.grad(lambda w, x: jnp.sum(layers(w, x)), argnums=(0, 1))
    assert compiled(gradient, *arrays).flops == 3 * LAYERS * 2 * ROWS * WIDTH * WIDTH


def test_nested_loops_multiply(arrays):
    def repeated(w, x):
        return jax.lax.fori_loop(0, 5, lambda _, x: layers(w, x), x)

    assert compiled(repeated, *arrays).flops == 5 * LAYERS * 2 * ROWS * WIDTH * WIDTH


def test_loops_are_listed_with_the_cost_of_one_iteration(arrays):
    text = jax.jit(lambda w, x: layers(w[:3], layers(w, x))).lower(*arrays).compile().as_text()
    found = [(cost.flops, times) for cost, times in loops(parse(text), 1)]
    assert sorted(found) == [(2 * ROWS * WIDTH * WIDTH, 3), (2 * ROWS * WIDTH * WIDTH, LAYERS)]


def test_a_loop_reads_one_slice_of_its_weights_at_a_time():
    weights, x = jnp.ones((64, 256, 256)), jnp.ones((8, 256))
    moved = compiled(layers, weights, x).moved
    assert weights.size * 4 <= moved < 4 * weights.size * 4  # reading all of them every time would be 64 times


def test_a_loop_writes_one_slice_of_what_it_stacks():
    x = jnp.ones((64, 256))

    def stacked(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), jnp.cos(c)), x, length=100)[1]

    out = 100 * x.size * 4
    assert out <= compiled(stacked, x).moved < 8 * out  # the whole stack every time would be 100 times


def test_an_elementwise_program_moves_its_arguments_and_its_result():
    x = jnp.ones((256, 256))
    assert compiled(lambda a, b: jnp.tanh(a) * b - a, x, x).moved == 3 * x.size * 4


def test_convolutions_count_only_what_meets_the_input():
    x, kernel = jnp.ones((2, 16, 8)), jnp.ones((3, 8, 4))  # batch 2, 16 positions, 8 features; 3 wide; 4 out

    def same(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))

    assert compiled(same, x, kernel).flops == 2 * 2 * (16 + 15 + 15) * 8 * 4


def test_a_real_training_step():
    """Three times the forward products; XLA's attention computes all T x T scores.

    The compiler may make products of a few sums (a softmax's gradient has one).
    """
    depth, width, tokens, batch, vocab = 3, 32, 16, 4, 101
    model = ModelConfig(depth, width, context=tokens, vocab=vocab, dtype="float32", attention="xla", heads=4)
    config = RunConfig(find_scheme("plain")(), model, train=TrainConfig(batch=batch), mesh=MeshConfig(data=1))
    step, args, mesh = training_step(config, jax.devices()[:1])
    with jax.set_mesh(mesh):
        found = account(parse(step.trace(*args).lower().compile().as_text()), 1)
    weights = depth * (4 * width * width + 3 * width * model.hidden) + vocab * width
    scores = depth * 2 * width * tokens
    expected = 3 * 2 * batch * tokens * (weights + scores)
    assert expected <= found.flops <= 1.005 * expected
    assert found.sent == 0 and not found.collectives


def test_accumulation_is_counted_per_part():
    model = ModelConfig(2, 32, context=16, vocab=31, dtype="float32", attention="xla")
    whole = RunConfig(find_scheme("plain")(), model, train=TrainConfig(batch=4), mesh=MeshConfig(data=1))
    halves = dataclasses.replace(whole, train=TrainConfig(batch=4, accumulate=2))
    flops = []
    for config in (whole, halves):
        step, args, _ = training_step(config, jax.devices()[:1])
        flops.append(account(parse(step.trace(*args).lower().compile().as_text()), 1).flops)
    assert flops[0] == flops[1]


def test_collectives_in_a_loop(arrays):
    """Weights split over 8 devices: each layer gathers one matrix."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",), axis_types=(AxisType.Auto,))
    place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
    weights, x = (place(a, spec) for a, spec in zip(arrays, (P(None, "fsdp"), P("fsdp")), strict=True))

    def gathered(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))), None

        return jax.lax.scan(layer, x, weights)[0]

    found = compiled(gathered, weights, x).collectives
    assert set(found) == {"all-gather"}
    assert found["all-gather"].count == LAYERS
    assert found["all-gather"].sent == LAYERS * WIDTH * WIDTH * 4 * 7 / 8


def test_a_sum_over_devices_goes_around_twice():
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    total = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P()))
    found = account(parse(total.lower(x).compile().as_text()), 8).collectives
    assert found["all-reduce"].sent == pytest.approx(2 * 7 / 8 * 128 * 4)


@pytest.mark.parametrize(
    "text, n",
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, x", 4),
        ("replica_groups=[4,2]<=[8]", 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups=mesh['data'=2,'fsdp'=4,'tensor'=1] {'fsdp'}, y", 4),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}", 8),
        ("replica_groups={}", 16),
    ],
)
def test_group_sizes(text, n):
    assert group_size(text, 16) == n


@pytest.mark.parametrize(
    "dtype, size_of",
    [("f8e8m0fnu", 8), ("f8e4m3fnuz", 8), ("f4e2m1fn", 4), ("c64", 64), ("c128", 128), ("s2", 2), ("u4", 4)],
)
def test_no_array_counts_as_nothing(dtype, size_of):
    assert size(f"{dtype}[1024]{{0}}") == 1024 * size_of // 8


def test_a_type_that_is_not_known_is_named():
    with pytest.raises(ValueError, match="arrays of q7"):
        size("(f32[2]{0}, q7[8]{0})")


def test_types():
    assert size("(bf16[3,5]{1,0}, s32[], pred[7]{0})") == 3 * 5 * 2 + 4 + 7
    assert size("f32[8,128]{1,0:T(8,128)S(1)}") == 0
    assert size("f32[8,128]{1,0:T(8,128)S(1)}", everywhere=True) == 4096
    assert parts("(f32[2,3]{1,0:T(8,128)}, (s32[], u32[]))") == ["f32[2,3]{1,0:T(8,128)}", "(s32[], u32[])"]
