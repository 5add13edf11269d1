"""PTX programs written by hand: one that the assembler accepts and one that it refuses."""

import pytest

from pallas_kernels.aot import ptx

COPY = """.version 8.0
.target sm_90
.address_size 64
.visible .entry copy(.param .u64 from, .param .u64 to) {
  .reg .u64 %a<3>;
  .reg .f32 %f;
  ld.param.u64 %a1, [from];
  ld.param.u64 %a2, [to];
  ld.global.f32 %f, [%a1];
  st.global.f32 [%a2], %f;
  ret;
}
"""


def test_a_program_is_assembled_or_its_fault_is_reported():
    if not ptx.assembler():
        pytest.skip("ptxas is not installed (extra `aot`)")
    found = ptx.assemble(COPY)
    assert found["problems"] == [] and found["registers"] > 0 and found["spilled"] == 0
    (problem,) = ptx.assemble(COPY.replace("st.global.f32 [%a2], %f", "st.global.f32 [%a2], %g"))["problems"]
    assert "ptxas for sm_90" in problem and "%g" in problem
