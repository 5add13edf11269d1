import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.jobs import Record
from experiments.harness.recipe import load, planned
from experiments.harness.students import KINDS, WIDTH, Gate, branch, rms, turn, turned
from experiments.harness.toy import REGIMES, Student, Toy
from experiments.inverse_depth_students import Settings, Tuned, by_depth, exponents, summarise, tuned, verdict
from nagjax.errors import UserError
from pallas_kernels import nag_update
from tests.tolerance import assert_close

NOISE = np.random.default_rng(0)


def _unit(x):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True))


def test_a_turn_of_zero_or_towards_nothing_leaves_the_direction():
    r, u = _unit(NOISE.normal(size=(2, 5, WIDTH)))
    assert_close(turned(r, u, jnp.zeros((5, 1))), r, terms=64, chain=24)
    assert_close(turned(r, jnp.zeros_like(u), jnp.ones((5, 1))), r, terms=64, chain=24)
    np.testing.assert_allclose(turned(r, 3.0 * r, jnp.ones((5, 1))), r, atol=5e-3)
    slope = jax.grad(lambda u: jnp.sum(turned(r, u, jnp.ones((5, 1)))[:, 0]))(jnp.zeros_like(r))
    assert np.all(np.isfinite(slope))


def test_a_turn_is_the_kernel_s_where_nothing_has_a_mean():
    r, u = NOISE.normal(size=(2, 5, WIDTH))
    r, u = _unit(r - r.mean(-1, keepdims=True)), u - u.mean(-1, keepdims=True)
    t = np.linspace(0.1, 2.0, 5)
    wanted, *_ = nag_update(*map(jnp.float32, (r, np.zeros(5), u, t)))
    np.testing.assert_allclose(turned(*map(jnp.float32, (r, u, t[:, None]))), wanted, rtol=1e-3, atol=1e-4)


def test_a_block_turns_by_alpha_times_its_modulator():
    gate = Gate(*(0.5 * NOISE.normal(size=shape) for shape in ((WIDTH, 3), (3,), (3,), (), ())))
    r = NOISE.normal(size=(5, WIDTH))
    p = np.exp(gate.logits) / np.exp(gate.logits).sum()
    mixture = (1 / (1 + np.exp(-(r @ gate.weight + gate.bias)))) @ p
    wanted = gate.alpha * mixture ** np.log1p(np.exp(gate.beta))
    np.testing.assert_allclose(turn(gate, r)[:, 0], wanted, rtol=1e-4)


def test_scaled_students_read_less_of_the_state_the_deeper():
    blocks = KINDS["nag"].start(jax.random.key(0), 3).blocks
    x = jax.random.normal(jax.random.key(1), (4, WIDTH))
    wanted = rms(x)
    for i in range(3):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], blocks)
        wanted = wanted + branch(block, rms(wanted) / (i + 1) ** 0.5)
    assert_close(KINDS["lns"].states(blocks, x), rms(wanted), terms=64, chain=24)


def test_only_norm_agnostic_students_do_not_start_as_the_identity_but_near_it():
    x = jax.random.normal(jax.random.key(1), (64, WIDTH))
    for name, kind in KINDS.items():
        moved = np.asarray(kind.states(kind.start(jax.random.key(0), 4), x)) - rms(x)
        assert (0.01 < np.sqrt(np.mean(moved**2)) < 0.2) if name == "nag" else not np.any(np.abs(moved) > 1e-5)


def test_rates_are_the_kind_s_times_the_factor():
    toy = Toy(dataclasses.replace(REGIMES["independent"], student="nag", decay=False), (2,), (1.0,), 1, 4, 4, 1)
    student = Student(KINDS["nag"].start(jax.random.key(0), 2), jnp.zeros(3))
    adam = toy._adam(2, 0.5)
    slopes = jax.tree.map(jnp.ones_like, student)  # whose first step in Adam is the rate
    change, _ = adam.update(slopes, adam.init(student))
    rate = 0.5 * toy.regime.rate
    np.testing.assert_allclose(change.head, -rate, rtol=1e-4)
    np.testing.assert_allclose(change.blocks.blocks.up, -6 * rate, rtol=1e-4)
    np.testing.assert_allclose(change.blocks.gate.alpha, -rate / 2, rtol=1e-4)


SETTINGS = Settings((4, 8, 16), 6, 8, 8, 1.0, factors=(0.5, 1.0, 2.0), regimes=("independent",))


def record(kind: str, power: float, spread: float = 0.05) -> Record:
    """Losses that fall with depth, by another power for each teacher; at other rates than the best, tenfold. The first
    teacher, on which rates are chosen, is far off."""
    powers = power + np.array([3.0, *spread * np.linspace(-1.0, 1.0, 5)])
    losses = {str(d): [[10.0 * d**-p, d**-p, 10.0 * d**-p] for p in powers] for d in SETTINGS.depths}
    return Record("", {"regime": "independent", "student": kind}, {}, {"losses": losses})


def test_exponents_of_planted_losses():
    planted = record("nag", 1.5)
    best = by_depth(SETTINGS, planted)
    assert [(one.factor, one.edge) for one in best.values()] == [(1.0, False)] * 3
    np.testing.assert_allclose(list(exponents(best).values()), [1.45, 1.475, 1.5, 1.525, 1.55])
    assert list(exponents(best)) == [1, 2, 3, 4, 5]
    planted.metrics["losses"]["8"][0] = [np.nan, np.inf, np.nan]  # diverged at every rate on the first teacher
    left = by_depth(SETTINGS, planted)
    assert list(left) == [4, 16]
    np.testing.assert_allclose(list(exponents(left).values()), [1.45, 1.475, 1.5, 1.525, 1.55])
    assert exponents({4: left[4]}) == {}
    planted.metrics["losses"]["16"][3] = [1.0, np.nan, 1.0]  # on another one, at the rate chosen
    assert list(by_depth(SETTINGS, planted)) == [4]


def test_verdicts():
    own = lambda power, spread=0.05: exponents(by_depth(SETTINGS, record("nag", power, spread)))  # noqa: E731
    assert verdict(own(1.0), own(1.5)) == "supported"
    assert verdict(own(1.0), own(0.5)) == verdict(own(1.0), own(1.08)) == "not supported"
    assert verdict(own(1.0), own(1.2)) == "not supported"  # above, but by less than a quarter
    assert verdict(own(1.0), own(1.5, 0.6)) == verdict({}, own(1.5)) == "undecided"
    whole = [record("ordinary", 1.0), record("nag", 2.0)]
    half = lambda *powers: [half_of(record(k, p)) for k, p in zip(("ordinary", "nag"), powers, strict=True)]  # noqa: E731
    summary = summarise(SETTINGS, whole + half(0.98, 1.95))
    assert summary.verdict == "supported" and "nag 2.00 [1.95, 2.05]" in summary.measured
    assert summary.table[1]["lr x"] == "1, 1, 1" and summary.details["at_the_grid_edge"] == []
    untuned = dataclasses.replace(SETTINGS, factors=(1.0,))
    middle = {at: [[one[1]] for one in own] for at, own in whole[1].metrics["losses"].items()}
    one_rate = [dataclasses.replace(one, metrics={"losses": middle}) for one in (*whole, *half(0.98, 1.95))]
    assert summarise(untuned, one_rate).reasons == ["rates not tuned"]
    whole[1].metrics["losses"]["16"][2][1] = np.nan
    summary = summarise(SETTINGS, whole + half(0.98, 1.95))
    assert summary.verdict == "undecided" and "diverged: nag of 16 blocks" in summary.reasons
    assert summary.table[1]["l=16"] == "diverged"


def half_of(record: Record) -> Record:
    return dataclasses.replace(record, labels=record.labels | {"half": True})


def test_an_exponent_that_still_moves_decides_nothing():
    whole = [record("ordinary", 1.0), record("nag", 2.0)]
    assert summarise(SETTINGS, whole).verdict == "undecided"
    moving = summarise(SETTINGS, [*whole, half_of(record("ordinary", 0.7)), half_of(record("nag", 2.0))])
    assert moving.verdict == "undecided" and moving.reasons == ["ordinary: moved by +0.30 as the steps doubled"]


def test_the_rate_is_that_of_a_teacher_that_does_not_count():
    losses = np.array([[2.0, 1.0, 3.0], *[[0.1, 1.0, 3.0]] * 5])
    assert tuned(losses, (0.5, 1.0, 2.0)) == Tuned(1.0, False, {teacher: 1.0 for teacher in range(1, 6)})
    few = dataclasses.replace(SETTINGS, teachers=4)
    told = summarise(few, [record("ordinary", 1.0), half_of(record("ordinary", 1.0))])
    assert told.reasons == ["3 fresh teachers, 5 needed"]


def test_bad_settings():
    recipe = load("inverse_depth_students")
    for change, match in (
        ({"students": ("nig",)}, "ordinary"),
        ({"regimes": ("tied, Runge-Kutta",)}, "independent"),
        ({"depths": (3, 6), "students": ("midpoint",)}, "even"),
        ({"teachers": 1}, "at least 2"),
        ({"factors": (2.0, 1.0)}, "ascending"),
        ({"factors": (-1.0,)}, "above 0"),
        ({"depths": (4, 4)}, "once"),
        ({"test_batches": 0}, "at least 1"),
    ):
        with pytest.raises(UserError, match=match):
            planned(recipe, dataclasses.replace(recipe.settings("cpu"), **change))
