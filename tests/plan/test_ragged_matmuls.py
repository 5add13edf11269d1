"""FLOPs of ragged products, as XLA writes them."""

import pytest

from nagjax.plan.account import account
from pallas_kernels.hlo import parse

PROGRAM = """HloModule step

ENTRY %main (x: f32[32,8], w: f32[4,8,16], sizes: s32[4], d: f32[32,16]) -> {out} {{
  %x = f32[32,8]{{1,0}} parameter(0)
  %w = f32[4,8,16]{{2,1,0}} parameter(1)
  %sizes = s32[4]{{0}} parameter(2)
  %d = f32[32,16]{{1,0}} parameter(3)
  ROOT %product = {out} ragged-dot({operands}, %sizes), {dims}
}}
"""
FORWARD = "lhs_contracting_dims={1}, rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}"
BY_MATRIX = "lhs_contracting_dims={0}, rhs_contracting_dims={0}, lhs_ragged_dims={0}"


@pytest.mark.parametrize(
    "out, operands, dims", [("f32[32,16]{1,0}", "%x, %w", FORWARD), ("f32[4,8,16]{2,1,0}", "%x, %d", BY_MATRIX)]
)
def test_every_row_is_multiplied_once(out, operands, dims):
    program = parse(PROGRAM.format(out=out, operands=operands, dims=dims))
    assert account(program, 1).flops == 2 * 32 * 8 * 16


KERNELS = {  # as a TPU's compiler and a GPU's write them; the first operands of a TPU's are about the groups
    "%ragged-dot-none.1": 'custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/ragged-dot-none"}',
    "%triton_kernel_call.1": 'custom_call_target="triton_kernel_call_ffi", '
    'metadata={op_name="jit(step)/mlp/experts/shard_map/grouped_matmul/triton_kernel_call"}',
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("out, operands", [("f32[32,16]{1,0}", "%x, %w"), ("f32[4,8,16]{2,1,0}", "%x, %d")])
def test_kernels_multiply_every_row_once(name, out, operands):
    text = PROGRAM.format(out=out, operands="", dims="").replace("%product", name)
    given = f"%sizes, {operands}" if "tpu" in KERNELS[name] else f"{operands}, %sizes"
    program = parse(text.replace("ragged-dot(, %sizes), ", f"custom-call({given}), {KERNELS[name]}"))
    found = account(program, 1)
    assert found.flops == 2 * 32 * 8 * 16
    assert found.kernels == {"ragged-dot-none" if "ragged" in name else "grouped_matmul": 1}
