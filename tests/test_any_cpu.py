"""The runs of `make test-any-cpu`, and the tolerance that the tests allow for numbers."""

import itertools

import numpy as np
import pytest

from pallas_kernels.origin import processor
from tests import any_cpu
from tests.tolerance import assert_close, close_to


def test_four_runs_cover_every_value_and_the_pairs_of_threads_and_emitters():
    assert {case.isa for case in any_cpu.COVER} == set(any_cpu.ISAS)
    pairs = {(case.threads, case.emitters) for case in any_cpu.COVER}
    assert pairs == set(itertools.product(any_cpu.THREADS, any_cpu.EMITTERS))
    assert all(len(set(factor)) == 2 for factor in zip(*any_cpu.BESIDE, strict=True))
    assert all((any_cpu.FOLDER / name).exists() for name in (*any_cpu.NUMERICAL, *any_cpu.QUICK))


def test_a_run_is_told_its_instruction_set(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_fusion=true")
    found = any_cpu.Case("AVX2", 1, "new").environment()
    assert found["XLA_FLAGS"] == "--xla_cpu_use_fusion=true --xla_cpu_max_isa=AVX2" and found["EMITTERS"] == "new"
    assert "max_isa" not in any_cpu.Case("own", 1, "old").environment()["XLA_FLAGS"]


@pytest.mark.parametrize("order", [np.sort, lambda x: x[:, ::-1], lambda x: x], ids=["sorted", "reversed", "as it is"])
def test_sums_in_any_order_are_within_the_tolerance(order):
    """Of numbers whose sum is near 0: an absolute part of their own size is needed, and is enough."""
    terms = np.random.default_rng(0).standard_normal((200, 1000)).astype(np.float32)
    truth = terms.sum(axis=1, dtype=np.float64)
    got = np.zeros(200, np.float32)
    for column in order(terms.copy()).T:
        got += column
    assert_close(got, truth, terms=1000)
    with pytest.raises(AssertionError):
        assert_close(got * np.float32(1 + 1e-3), truth, terms=1000)
    assert 0.0 != close_to(1e-3, terms=1000) and 0.0 == close_to(0.0, terms=1, scale=1.0)


def test_the_processor_has_a_name():
    assert processor().strip() and "\n" not in processor()
