"""Tables of compiled programs: they are those of their results, and say what they were made for."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import block_bytes, experiment_costs, head_memory, library_kernels, long_context, plan
from benchmarks import plan_tables as tables
from benchmarks.compiled import results_of
from benchmarks.library_choices import Figures


def results(name):
    return json.loads(results_of(name).read_text())


ALL = block_bytes, experiment_costs, head_memory, library_kernels, long_context, plan
MADE = {made.__name__.rpartition(".")[2]: made for made in ALL}


@pytest.mark.parametrize("name", MADE)
def test_the_tables_are_those_of_the_results(name):
    made, found = MADE[name], results(name)
    assert [tuple(one["case"]) for one in found] == made.CASES
    assert all({"jax", "commit", "date"} <= set(one) for one in found)
    for page, texts in made.PAGES.items():
        assert page.read_text() == tables.inserted(page.read_text(), texts(found))


def test_the_large_sizes_of_all_experiments_fit_the_time_they_are_meant_for():
    """By the plans of compiled steps, all of which fit their machine."""
    found = results("experiment_costs")
    assert all(one["fits"] and 0 < one["highest_mfu"] < 1 for one in found)
    (page,) = map(Path.read_text, experiment_costs.PAGES)  # whose table is that of the results: see above
    table = page.split("<!-- costs -->")[1].strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    for name, size, *_, hours in rows:
        assert float(hours) <= experiment_costs.MACHINES[size].limit, (name, size)
    assert len(rows) > 30


def test_a_long_context_with_a_large_vocabulary_fits_one_chip():
    """Of either kind, and in chunks with less memory; but not where all scores are written."""
    found = {tuple(one["case"]): one for one in results("long_context")}
    for case in long_context.HEAD:
        assert found[case]["fits"] and found[case]["context"] == 32768 and found[case]["sequences"] == 1
    by_chunks = [found[case]["memory"]["peak"] for case in long_context.HEAD]
    assert by_chunks[0] < by_chunks[1] / 2 and by_chunks[2] < by_chunks[3] / 2
    for case in long_context.ATTENTION:
        assert found[case]["fits"] == (found[case]["attention"] == "tokamax")


def test_a_head_in_chunks_needs_no_more_for_more_tokens():
    chunked = {tuple(one["case"]): one["chunked"] for one in results("head_memory")}
    assert chunked["131072", "16"] < 1.1 * chunked["131072", "4"]


def test_the_choices_of_kernels_follow_from_their_figures():
    """Where the page says that the matmuls are the bound, and that one implementation is faster than another."""
    found = {tuple(one["case"]): Figures.of(one) for one in results("library_kernels")}
    bound = [("head", "v5e:2x2", "own"), ("experts", "v5e:2x2", "jax"), ("attention", "v5e:2x2", "splash")]
    bound += [("attention", "h200x1", f"tokamax {name}") for name in ("mosaic_gpu", "triton")]
    assert all(found[case].matmuls > found[case].memory for case in bound)
    for chip in ("v5e:2x2", "h200x1"):
        assert found["head", chip, "own"].least < found["head", chip, "tokamax chunked_xla"].least
    assert found["experts", "v5e:2x2", "tokamax mosaic_tpu"].memory < found["experts", "v5e:2x2", "jax"].matmuls
    nine, seven = (found["attention", "v5e:2x2", name] for name in ("splash", "tokamax splash"))
    assert seven.matmuls < nine.matmuls < found["attention", "v5e:2x2", "xla"].least


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
