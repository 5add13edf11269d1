"""Tables of compiled programs: they are those of their results, and say what they were made for."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import block_bytes, library_kernels
from benchmarks.compiled import results_of
from nagjax.plan import tables


def results(name):
    return json.loads(results_of(name).read_text())


@pytest.mark.parametrize("made", [block_bytes, library_kernels], ids=["block_bytes", "library_kernels"])
def test_the_table_is_that_of_the_results(made):
    page, name = made.PAGE.read_text(), made.__name__.rpartition(".")[2]
    assert [tuple(one["case"]) for one in results(name)] == made.CASES
    assert page == tables.insert(page, name.replace("_", " "), made.table(results(name)))


def test_without_a_library_a_gpu_does_the_work_of_all_experts():
    flops = {tuple(one["case"]): one["flops"] for one in results("library_kernels")}
    assert flops["experts", "h200x1", "jax"] == library_kernels.EXPERTS * flops["experts", "h200x1", "own"]


def test_on_an_h200_a_block_of_nag_moves_no_more_than_one_of_plain():
    """As long as blocks are computed again, and with joined products less than with separate ones."""
    moved = {tuple(one["case"]): one["moved"] for one in results("block_bytes")}
    assert moved["h200x8", "block", "joined", "nag"] <= moved["h200x8", "block", "joined", "plain"]
    for case, value in moved.items():
        joined = moved.get((case[0], case[1], "joined", case[3]))
        assert joined is None or case[2] == "joined" or joined < 0.95 * value


def test_the_stand_in_for_attention_is_one_kernel_each_way():
    q, k = (jax.ShapeDtypeStruct((2, 16, heads, 8), jnp.bfloat16) for heads in (4, 2))
    step = jax.make_jaxpr(jax.grad(lambda q, k, v: jnp.sum(block_bytes.attention(q, k, v)), (0, 1, 2)))(q, k, k)
    forward, backward = (one for one in step.eqns if one.primitive.name == "pallas_call")
    assert [x.aval.shape for x in forward.invars] == [q.shape, k.shape, k.shape]
    assert [x.aval.shape for x in forward.outvars] == [q.shape, (2, 4, 16)]
    assert len(backward.invars) == 6 and [x.aval.shape for x in backward.outvars] == [q.shape, k.shape, k.shape]
