"""A pruned model is the one that leaves the blocks out, with every scheme."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.data import load_tokenizer
from nagjax.measure.cuts import forward_without
from nagjax.report.pruning import without
from nagjax.residual.registry import find_scheme, schemes
from nagjax.runs.opening import OpenRun
from tests import tiny
from tests.tolerance import assert_close

DEPTH, GONE = 4, (1, 2)
OTHERS = {"denseformer", "mix_ln"}  # which cannot be so with any blocks: see `without`


def mix_ln(post: float):
    return dataclasses.replace(find_scheme("mix_ln")(), post=post)


def logits(run: OpenRun, stays):
    batch = tiny.packed_batch()
    out = jax.jit(lambda p, stays: forward_without(run.blueprint.model(p), batch, stays)[0])(
        run.params, jnp.array(stays)
    )
    return np.asarray(out)[np.asarray(batch.weights) > 0]


def both(scheme, gone):
    """Logits of the pruned model, and of the whole one that leaves the blocks out."""
    plan = tiny.blueprint(tiny.run_config(scheme, depth=DEPTH))
    run = OpenRun("run", plan, 100, tiny.moved(tiny.fresh(plan).params, 0.3), {}, load_tokenizer("bytes"))
    stays, one_by_one = [block not in gone for block in range(DEPTH)], run
    for block in sorted(gone, reverse=True):
        one_by_one = without(one_by_one, [block])
    pruned, other = (logits(short, sum(stays) * [True]) for short in (without(run, gone), one_by_one))
    assert_close(pruned, other, **tiny.FORWARD)
    return pruned, logits(run, stays)


@pytest.mark.parametrize("name", sorted({*schemes()} - OTHERS))
def test_a_pruned_model_is_the_one_that_leaves_blocks_out(name):
    pruned, left_out = both(find_scheme(name)(), GONE)
    assert_close(pruned, left_out, **tiny.FORWARD)


@pytest.mark.parametrize("gone", [(0,), (3,), (0, 2)], ids=str)
def test_block_attn_res_hands_on_its_queries(gone):
    pruned, left_out = both(dataclasses.replace(find_scheme("block_attn_res")(), blocks=3), gone)
    assert_close(pruned, left_out, **tiny.FORWARD)


@pytest.mark.parametrize(
    ("post", "gone"),
    [(1.0, (1, 2)), (0.75, (1, 2)), (1.0, (2, 3)), (0.5, (0, 1)), (0.25, (2, 3)), (0.25, (0, 1))],
    ids=str,
)
def test_mix_ln_hands_on_its_gains(post, gone):
    pruned, left_out = both(mix_ln(post), gone)
    assert_close(pruned, left_out, **tiny.FORWARD)


@pytest.mark.parametrize("scheme", [mix_ln(0.25), mix_ln(0.5), find_scheme("denseformer")()], ids=str)
def test_where_it_is_another_model(scheme):
    pruned, left_out = both(scheme, GONE)
    assert np.abs(pruned - left_out).max() > 1e-2
