"""The reader of compiled programs, on text written by hand and on programs compiled for the CPU."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot import traffic
from pallas_kernels.hlo import size

PROGRAM = """HloModule jit_f, is_scheduled=true

%fused (p: f32[64,128]) -> f32[64,128] {
  ROOT %double = f32[64,128]{1,0} add(%p, %p)
}

ENTRY %main.2 (a.1: f32[64,128], b.1: bf16[64,128]) -> (f32[64,128], bf16[64,128]) {
  %a.1 = f32[64,128]{1,0:T(8,128)} parameter(0), sharding={replicated}
  %b.1 = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(1)
  %copy-start = (bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[64,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%b.1)
  %copy-done = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %fusion = f32[64,128]{1,0:T(8,128)} fusion(%a.1), kind=kLoop, calls=%fused
  %kernel = (f32[64,128]{1,0:T(8,128)}, /*index=1*/bf16[64,128]{1,0:T(8,128)(2,1)}) custom-call(%fusion, %copy-done), \
custom_call_target="tpu_custom_call", operand_layout_constraints={f32[64,128]{1,0}, bf16[64,128]{1,0}}
  %first = f32[64,128]{1,0:T(8,128)} get-tuple-element(%kernel), index=0
  %second = bf16[64,128]{1,0:T(8,128)(2,1)} get-tuple-element(%kernel), index=1
  %sum = f32[64,128]{1,0:T(8,128)} all-reduce(%first), replica_groups={{0,1}}, to_apply=%add
  ROOT %tuple = (f32[64,128]{1,0:T(8,128)}, bf16[64,128]{1,0:T(8,128)(2,1)}) tuple(%sum, %second)
}
"""
WIDE, HALF = 64 * 128 * 4, 64 * 128 * 2


def test_traffic_counts_every_buffer_in_main_memory_once():
    prefetch = HALF  # read from memory, written on chip
    fusion, kernel, reduced = 2 * WIDE, WIDE + WIDE + HALF, 2 * WIDE
    assert traffic.traffic(PROGRAM) == prefetch + fusion + kernel + reduced


def test_kernel_traffic_counts_operands_on_chip_too():
    assert traffic.kernel_traffic(PROGRAM, "tpu_custom_call") == 2 * WIDE + 2 * HALF
    assert traffic.kernel_traffic(PROGRAM, "gpu.triton") == 0


def test_names_of_calls_and_collectives():
    assert traffic.custom_calls(PROGRAM) == {"tpu_custom_call": 1}
    assert traffic.collectives(PROGRAM) == {"all-reduce": 1}
    assert traffic.collectives("a = (f32[2]) all-gather-start(b)\n c = f32[2] all-gather-done(a)") == {"all-gather": 1}


@pytest.mark.parametrize(
    "fn, tensors", [(lambda a, b: a + b, 3), (lambda a, b: jnp.tanh(a) * b - a, 3), (lambda a, b: (a + b).T, 3)]
)
def test_a_fused_elementwise_program_moves_its_arguments_and_its_result(fn, tensors):
    x = jnp.ones((256, 256))
    text = jax.jit(fn).lower(x, x).compile().as_text()
    assert traffic.traffic(text) == tensors * x.size * 4


def test_size_of_types():
    assert size("(bf16[3,5]{1,0}, s32[], pred[7]{0})") == 3 * 5 * 2 + 4 + 7
    assert size("f32[8,128]{1,0:T(8,128)S(1)}") == 0
    assert size("f32[8,128]{1,0:T(8,128)S(1)}", everywhere=True) == 4096
