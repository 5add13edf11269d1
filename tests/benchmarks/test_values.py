"""The part `values` passes every correct program, and no wrong one."""

import concurrent.futures
import functools
import importlib
import math
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.parts import values
from benchmarks.parts.rows import Options
from pallas_kernels.bench import with_gradients
from pallas_kernels.dispatch import run
from pallas_kernels.ops import all_ops
from pallas_kernels.shapes import sample

SHAPES = ((300, 64), (40, 640))  # fewer features than rows, and more
DTYPES = ("bfloat16", "float32")
PLACES = [(*shape, dtype) for shape in SHAPES for dtype in DTYPES]
ONE_ROW = (1, 8192, "bfloat16")  # each sum over rows is one term
STORED = ("add_rms_norm", "review_update")  # what they store is read again


def module(name):
    return importlib.import_module(f"pallas_kernels.ops.{name}")


def errors_of(name, place, found):
    op = all_ops()[name]
    return values.judged(op, jax.device_get(found), values.known(op, *place).exact, *place)


def results(name, place, function):
    args, cotangents, _ = values.known(all_ops()[name], *place)
    return jax.device_get(jax.jit(functools.partial(with_gradients, function))(args, cotangents))


def by(name, place, implementation="xla"):
    constants = sample(name, *place).constants
    return results(name, place, functools.partial(run, all_ops()[name], implementation, **constants))


@pytest.mark.parametrize(
    "name, place",
    [(name, place) for name in all_ops() for place in PLACES] + [(name, ONE_ROW) for name in STORED],
    ids=str,
)
def test_correct_programs_pass_and_outputs_a_few_ulps_off_do_not(name, place):
    for implementation in ("reference", "xla"):
        op = all_ops()[name]
        found = values.measure(op, *place, values.prepared(op, implementation, *place))
        assert found["worst"] <= 1.0, (implementation, found["errors"])
    found = by(name, place)
    far = 5 if place[-1] == "bfloat16" else 5 * math.sqrt(place[1])  # what a sum over the row may be off by
    largest = np.unravel_index(np.argmax(np.abs(found[0])), found[0].shape)
    found[0] = np.array(found[0])
    found[0][largest] *= 1 + far * float(jnp.finfo(found[0].dtype).eps)
    assert errors_of(name, place, found)[0] > 1.0


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", STORED)
def test_a_gradient_without_that_of_the_statistics_does_not_pass(name, place, monkeypatch):
    values.known(all_ops()[name], *place)  # by the right reference
    fixed = types.SimpleNamespace(rsqrt=lambda x: jax.lax.stop_gradient(jax.lax.rsqrt(x)))
    monkeypatch.setattr(module(name), "lax", fixed)
    constants = sample(name, *place).constants
    wrong = results(name, place, lambda *args: module(name).reference(*args, **constants))
    monkeypatch.undo()
    errors = errors_of(name, place, wrong)
    assert max(errors[:2]) <= 1.0 < min(errors[2:4]), errors


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_gradient_without_the_gate_or_the_log_norm_does_not_pass(place, monkeypatch):
    monkeypatch.setattr(module("nag_update_modulated"), "_back", lambda dz, weight, dtype: jnp.zeros((), dtype))
    way = all_ops()["nag_update_modulated"].implementations["xla"]

    @jax.custom_vjp
    def wrong(*args):
        return way.forward(*args)[0]

    wrong.defvjp(lambda *args: (way.forward(*args)[0], (args[0], *args[2:])), way.backward)
    errors = errors_of("nag_update_modulated", place, results("nag_update_modulated", place, wrong))
    assert errors.pop(3) > 1.0 and max(errors) <= 1.0

    (_, _, _, turn), (_, pulled), _ = values.known(all_ops()["nag_update"], *place)
    found = by("nag_update", place)
    found[-1] = found[-1] - np.asarray(pulled * turn / (1 + turn**2))
    assert errors_of("nag_update", place, found)[-1] > 1.0


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", STORED)
def test_a_sum_without_its_last_row_does_not_pass(name, place):
    args, cotangents, _ = values.known(all_ops()[name], *place)
    short = jax.tree.map(lambda x: x[:-1] if x.ndim == 2 else x, (args, cotangents))
    found, fewer = (
        by(name, place),
        with_gradients(functools.partial(run, all_ops()[name], "xla", **sample(name, *place).constants), *short),
    )
    assert errors_of(name, place, [*found[:-1], fewer[-1]])[-1] > 1.0


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_what_is_summed_over_rows_is_known_from_the_op_and_not_from_its_size(place, monkeypatch):
    monkeypatch.setattr(values, "_error", lambda value, true, rounded, of_rows, *shape: of_rows)
    assert errors_of("add_rms_norm", place, by("add_rms_norm", place)) == [True] * 4 + [False]


def test_kernels_that_may_hang_come_behind_the_others_of_the_first_shapes_and_then_of_each(monkeypatch):
    monkeypatch.setattr(values, "runs_here", lambda *_: True)
    named = [case.name for case in values.cases(Options(False, None, 0.0))]
    last = [name["implementation"] == "mosaic_gpu" for name in named]
    shapes = [(name["rows"], name["width"], name["dtype"]) for name in named]
    ends = [i for i in range(1, len(named) + 1) if last[i - 1] and (i == len(named) or not last[i])]
    begins = [0, *ends[:-1]]
    assert set(shapes[: ends[0]]) == set(values.FIRST)
    assert all(len(set(shapes[a:b])) == 1 for a, b in zip(begins[1:], ends[1:], strict=True))
    assert len({tuple(name.values()) for name in named}) == len(named) and len(ends) == len(set(shapes)) - 2


def test_what_the_results_should_be_is_made_once_for_all_threads(monkeypatch):
    made = []
    monkeypatch.setattr(values, "oracle", lambda *args: made.append(1) or time.sleep(0.2))
    values._known.cache_clear()
    place = (3, 64, "float32")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [pool.submit(values.known, all_ops()["add_rms_norm"], *place) for _ in range(4)]
    assert len({id(future.result()) for future in found}) == len(made) == 1
    values._known.cache_clear()
