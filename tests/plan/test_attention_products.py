"""FLOPs of attention kernels, on text in the form that the compilers print."""

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


@pytest.mark.parametrize(
    ("name", "products"), [(NAME, 2), (f"vmap({NAME}_fwd_res)", 2), (f"{NAME}_vjp", 7), ("other", 0)]
)
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


SPLASH = """HloModule jit_step

ENTRY %main (t: s32[{table}], q: bf16[{q}], k: bf16[{k}]) -> {out} {{
  %t = s32[{table}]{{2,1,0}} parameter(0)
  %q = bf16[{q}]{{2,1,0}} parameter(1)
  %k = bf16[{k}]{{2,1,0}} parameter(2)
  ROOT %splash_mha_{kernel}_segmented.1 = {out} custom-call(%t, %t, %q, %k, %k), \
custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 128, \\"block_kv\\": 128, \\"block_q_dkv\\": 128, \\"block_kv_dkv\\": 128}}"
}}}}
}}
"""
ROW = 512 * (512 + 128) / 2  # pairs of a query and a key in the blocks on and below the diagonal


@pytest.mark.parametrize(
    ("queries", "keys", "table", "pairs"),
    [
        (512, 512, "1,4,4", ROW),
        (256, 512, "1,2,4", ROW / 2),  # half of a row, on one of two devices
        (1024, 1024, "1,8,4", 2 * ROW),  # two rows laid end to end, in a table of each row's own blocks
        (256, 1024, "1,2,4", ROW / 2),  # the same with a quarter of the tokens
    ],
)
@pytest.mark.parametrize("heads", [2, 8])
def test_products_of_splash_attention(queries, keys, table, pairs, heads):
    q, k = f"8,{queries},64", f"{heads},{keys},64"
    forward = SPLASH.format(table=table, q=q, k=k, kernel="fwd", out=f"bf16[{q}]{{2,1,0}}")
    assert account(parse(forward), 1).flops == 2 * 2 * 8 * pairs * 64
    apart = SPLASH.format(table=table, q=q, k=k, kernel="dkv", out=f"(bf16[{k}]{{2,1,0}}, bf16[{k}]{{2,1,0}})")
    assert account(parse(apart), 1).flops == 4 * 2 * 8 * pairs * 64
    joined = SPLASH.format(table=table, q=q, k=k, kernel="dkv", out=f"(bf16[3,{q}]{{3,2,1,0}}, bf16[{k}]{{2,1,0}})")
    assert account(parse(joined), 1).flops == 5 * 2 * 8 * pairs * 64
