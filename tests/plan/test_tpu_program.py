"""Features that only TPU programs have, on text in the form that their compiler prints."""

from nagjax.plan.account import account
from pallas_kernels.hlo import parse

PROGRAM = """HloModule jit_step, is_scheduled=true

%start (p: bf16[128,512]) -> (bf16[128,512], bf16[512,512], u32[]) {
  %p = bf16[128,512]{1,0:T(8,128)(2,1)} parameter(0)
  %gather.1 = bf16[512,512]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=3, replica_groups=mesh['fsdp'=4] {'fsdp'}, \
dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %begun = (bf16[128,512]{1,0}, bf16[512,512]{1,0}, u32[]{:S(2)}) custom-call(%gather.1), \
custom_call_target="AsyncCollectiveStart"
}

%done (p.1: bf16[128,512], q.1: bf16[512,512]) -> bf16[512,512] {
  %p.1 = bf16[128,512]{1,0} parameter(0)
  %q.1 = bf16[512,512]{1,0} parameter(1)
  %gather.2 = bf16[512,512]{1,0} all-gather(%p.1), channel_id=3, replica_groups=mesh['fsdp'=4] {'fsdp'}, \
dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %ended = bf16[512,512]{1,0} custom-call(%p.1, %q.1, %gather.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.7 (g: f32[512,512]) -> f32[128,512] {
  %g = f32[512,512]{1,0} parameter(0)
  %sum = f32[512,512]{1,0} all-reduce(%g), channel_id=4, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %own = f32[128,512]{1,0} dynamic-slice(%sum, %g), dynamic_slice_sizes={128,512}
}

%body (state: (s32[], bf16[128,512], f32[512,512])) -> (s32[], bf16[128,512], f32[512,512]) {
  %state = (s32[]{:T(128)}, bf16[128,512]{1,0}, f32[512,512]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %shard = bf16[128,512]{1,0} get-tuple-element(%state), index=1
  %grad = f32[512,512]{1,0} get-tuple-element(%state), index=2
  %async = (bf16[128,512]{1,0}, bf16[512,512]{1,0}, u32[]{:S(2)}) fusion(%shard), kind=kCustom, calls=%start
  %a = bf16[128,512]{1,0} get-tuple-element(%async), index=0
  %b = bf16[512,512]{1,0} get-tuple-element(%async), index=1
  %whole = bf16[512,512]{1,0} fusion(%a, %b), kind=kCustom, calls=%done
  %product = bf16[128,512]{1,0:T(8,128)(2,1)S(1)} convolution(%shard, %whole), dim_labels=bf_io->bf
  %scattered = f32[128,512]{1,0:S(1)} fusion(%grad), kind=kCustom, calls=%all-reduce-scatter.7
  %splash_mha_fwd_residuals.1 = bf16[2,4,1024,128]{3,2,1,0} custom-call(%q, %k, %v), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, \\"block_kv\\": 512}"
}}, metadata={op_name="jit(step)/splash_mha_fwd_residuals/pallas_call"}
  %q = bf16[2,4,1024,128]{3,2,1,0:S(1)} parameter(1)
  %k = bf16[2,4,1024,128]{3,2,1,0:S(1)} parameter(2)
  %v = bf16[2,4,1024,128]{3,2,1,0:S(1)} parameter(3)
  ROOT %next = (s32[]{:T(128)}, bf16[128,512]{1,0}, f32[512,512]{1,0}) tuple(%i, %shard, %grad)
}

%condition (state.1: (s32[], bf16[128,512], f32[512,512])) -> pred[] {
  %limit = s32[]{:T(128)} constant(10)
  %state.1 = (s32[]{:T(128)}, bf16[128,512]{1,0}, f32[512,512]{1,0}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%at, %limit), direction=LT
}

ENTRY %main (x: (s32[], bf16[128,512], f32[512,512])) -> (s32[], bf16[128,512], f32[512,512]) {
  %x = (s32[]{:T(128)}, bf16[128,512]{1,0}, f32[512,512]{1,0}) parameter(0)
  ROOT %loop = (s32[]{:T(128)}, bf16[128,512]{1,0}, f32[512,512]{1,0}) while(%x), condition=%condition, body=%body
}
"""
FOUND = account(parse(PROGRAM), 4)


def test_a_collective_that_runs_beside_a_product_is_counted_once_a_turn():
    gather = FOUND.collectives["all-gather"]
    assert gather.count == 10 and gather.sent == 10 * 3 * 128 * 512 * 2


def test_the_fused_form_of_a_reduce_scatter_is_recognised():
    assert set(FOUND.collectives) == {"all-gather", "reduce-scatter"}
    assert FOUND.collectives["reduce-scatter"].sent == 10 * 3 / 4 * 512 * 512 * 4


def test_products_and_attention_blocks_on_and_below_the_diagonal():
    product = 2 * 128 * 512 * 512
    attention = 2 * 2 * (2 * 4) * (3 * 512 * 512) * 128  # two products, 3 of 4 blocks
    assert FOUND.flops == 10 * (product + attention)


def test_kernels_by_name():
    assert FOUND.kernels == {"splash_mha_fwd_residuals": 10}


def test_what_stays_on_chip_moves_nothing():
    shard, whole, gradient = 128 * 512 * 2, 512 * 512 * 2, 512 * 512 * 4
    gathered = shard + whole  # read and written once, by the fusion that starts it
    product = shard + whole  # its result stays on chip
    attention = 2 * 4 * 1024 * 128 * 2  # its operands are on chip
    assert FOUND.moved == 10 * (gathered + product + gradient + attention) + 10 * small()


def small():
    return 4 + 4 + 1  # the condition's comparison


TWO_STEPS = """HloModule jit_windowed

%body (state: (f32[8,8], u32[])) -> (f32[8,8], u32[]) {
  %two = u32[]{:T(128)} constant(2)
  %state = (f32[8,8]{1,0}, u32[]{:T(128)}) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%state), index=0
  %i = u32[]{:T(128)} get-tuple-element(%state), index=1
  %next = u32[]{:T(128)} add(%i, %two)
  %product = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (f32[8,8]{1,0}, u32[]{:T(128)}) tuple(%product, %next)
}

%condition (state.1: (f32[8,8], u32[])) -> pred[] {
  %limit = u32[]{:T(128)} constant(5)
  %state.1 = (f32[8,8]{1,0}, u32[]{:T(128)}) parameter(0)
  %at = u32[]{:T(128)} get-tuple-element(%state.1), index=1
  ROOT %less = pred[]{:T(512)} compare(%at, %limit), direction=LT
}

ENTRY %main (x: (f32[8,8], u32[])) -> (f32[8,8], u32[]) {
  %x = (f32[8,8]{1,0}, u32[]{:T(128)}) parameter(0)
  ROOT %loop = (f32[8,8]{1,0}, u32[]{:T(128)}) while(%x), condition=%condition, body=%body
}
"""


def test_a_loop_that_takes_two_steps_a_turn():
    assert account(parse(TWO_STEPS), 4).flops == 3 * 2 * 8**3
