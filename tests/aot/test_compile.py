"""Kernels through the real compilers. Needs the wheels of the `aot` extra; `make aot` compiles everything."""

import functools

import jax
import pytest

from pallas_kernels.aot.cases import EDGES, TABLE, Case, cases
from pallas_kernels.aot.runner import run
from pallas_kernels.aot.targets import TARGETS, missing


@functools.cache
def results(name):
    target = TARGETS[name]
    if reason := missing(target):
        pytest.skip(reason)
    kernel = {"tpu": "mosaic_tpu", "cuda": "pallas_triton"}[target.platform]
    chosen = [
        c
        for c in cases(target)
        if c.implementation == kernel and (c.rows, c.width, c.dtype) in (TABLE[1], EDGES[1], (0, 0, ""))
    ]
    return dict(run(target, chosen))


@pytest.mark.parametrize("name", TARGETS)
def test_kernels_fit_and_visit_memory_once(name):
    found = {c: r for c, r in results(name).items() if c.verb != "step"}
    assert len(found) >= 8
    assert {c.label: r["problems"] for c, r in found.items() if r["problems"]} == {}


@pytest.mark.parametrize("name", TARGETS)
def test_sharded_steps_communicate_gradients_alone(name):
    found = {c: r for c, r in results(name).items() if c.verb == "step"}
    assert len(found) >= 2
    assert {c.label: r["problems"] for c, r in found.items() if r["problems"]} == {}
    assert all(r["collectives"].get("all-reduce") for r in found.values())


@pytest.mark.parametrize("name", ["v5e"])
def test_a_block_beyond_the_chip_is_refused_by_its_compiler(name, monkeypatch):
    """The check that a program fits is the compiler's own: a budget it does not have ends in its error."""
    target = TARGETS[name]
    if reason := missing(target):
        pytest.skip(reason)
    from pallas_kernels import mosaic_rows
    from pallas_kernels.aot.targets import ENVIRONMENT, devices
    from pallas_kernels.aot.worker import compile_case

    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(mosaic_rows, "VMEM_BYTES", 2**30)
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)vmem"):
        compile_case(Case("review_update", "mosaic_tpu", "backward", *TABLE[1]), target, devices(target))
