"""FLOPs of tokamax's attention kernels, on text in the form that a GPU's compiler prints."""

import pytest

from nagjax.plan.account import account
from pallas_kernels.hlo import parse

PROGRAM = """HloModule jit_step

ENTRY %main (q: bf16[{queries},16,64], k: bf16[1024,4,64], first: s32[1,{queries}]) -> bf16[{queries},16,64] {{
  %q = bf16[{queries},16,64]{{2,1,0}} parameter(0)
  %k = bf16[1024,4,64]{{2,1,0}} parameter(1)
  %first = s32[1,{queries}]{{1,0}} parameter(2)
  ROOT %pallas_call.1 = bf16[{queries},16,64]{{2,1,0}} custom-call(%q, %k, %k, %first), \
custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="jit(step)/{name}/pallas_call"}}
}}
"""
NAME = "pallas_flash_attention"


@pytest.mark.parametrize(("name", "products"), [(NAME, 2), (f"{NAME}_fwd_res", 2), (f"{NAME}_vjp", 7), ("other", 0)])
@pytest.mark.parametrize(("queries", "keys_each"), [(1024, (1024 + 64) / 2), (256, 1024)])
def test_products_of_the_tiles_that_are_visited(name, products, queries, keys_each):
    found = account(parse(PROGRAM.format(name=name, queries=queries)), 1)
    assert found.flops == products * 2 * 16 * queries * keys_each * 64


HOPPER = """HloModule jit_step

ENTRY %main (q: bf16[2,1024,16,64], k: bf16[2,1024,{heads},64], first: s32[2,1,1024]) -> {out} {{
  %q = bf16[2,1024,16,64]{{3,2,1,0}} parameter(0)
  %k = bf16[2,1024,{heads},64]{{3,2,1,0}} parameter(1)
  %first = s32[2,1,1024]{{2,1,0}} parameter(2)
  ROOT %mpmd_map.1 = {out} custom-call({operands}), custom_call_target="mosaic_gpu_v2", \
metadata={{op_name="jit(step)/jvp(tokamax_attention)/vmap()/mpmd_map"}}
}}
"""
QUERIES, ROWS = "bf16[2,1024,16,64]{3,2,1,0}", "f32[2,16,1024]{2,1,0}"


@pytest.mark.parametrize("heads", [4, 16])
@pytest.mark.parametrize(
    ("out", "operands", "products"),
    [
        (f"({QUERIES}, {ROWS}, {ROWS})", "%q, %k, %k, %first", 2),
        (QUERIES, "%q, %k, %k, %first", 2),
        (QUERIES, "%q, %k, %k, %q, %first", 3),
        ("(bf16[2,1024,{heads},64]{{3,2,1,0}}, bf16[2,1024,{heads},64]{{3,2,1,0}})", "%q, %k, %k, %q, %first", 4),
    ],
)
def test_products_of_the_kernels_for_hopper(out, operands, products, heads):
    out = out.format(heads=heads) if "{heads}" in out else out
    found = account(parse(HOPPER.format(out=out, operands=operands, heads=heads)), 1)
    assert found.flops == products * 2 * 2 * 16 * 1024 * (1024 + 64) / 2 * 64
    assert found.kernels == {"tokamax_attention": 1}
