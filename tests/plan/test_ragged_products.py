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
