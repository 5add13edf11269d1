import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.jobs import Record
from experiments.harness.recipe import load
from experiments.harness.students import KINDS, WIDTH, Blocks
from experiments.harness.toy import REGIMES, Toy, start_student, start_teacher
from experiments.inverse_depth_toy import exponents, summarise
from nagjax.errors import UserError


def _norm(x):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def _branch(x, up, bias, down):
    return np.maximum(_norm(x) @ up + bias, 0.0) ** 2 @ down


def _blocks(depth: int) -> tuple[Blocks, np.ndarray]:
    noise = np.random.default_rng(0)
    shapes = (depth, WIDTH, 128), (depth, 128), (depth, 128, WIDTH)
    return Blocks(*(0.1 * noise.normal(size=shape) for shape in shapes)), noise.normal(size=(3, WIDTH))


def test_equations():
    blocks, x = _blocks(4)
    wanted = _norm(x)
    for block in zip(*blocks, strict=True):
        wanted = wanted + _branch(wanted, *block)
    got = KINDS["ordinary"].states(jax.tree.map(jnp.float32, blocks), jnp.float32(x))
    np.testing.assert_allclose(got, _norm(wanted), rtol=1e-4, atol=1e-5)
    wanted, parts = _norm(x), list(zip(*blocks, strict=True))
    for first, second in ((0, 1), (2, 3)):
        wanted = wanted + _branch(wanted + _branch(wanted, *parts[first]) / 2, *parts[second])
    got = KINDS["midpoint"].states(jax.tree.map(jnp.float32, blocks), jnp.float32(x))
    np.testing.assert_allclose(got, _norm(wanted), rtol=1e-4, atol=1e-5)


def test_start_values():
    regimes = [dataclasses.replace(REGIMES[name], teacher_depth=3) for name in ("tied", "independent")]
    tied, free = (start_teacher(jax.random.key(0), regime).blocks.up for regime in regimes)
    assert tied.shape == free.shape == (3, WIDTH, 128)
    assert jnp.all(tied == tied[0]) and not jnp.all(free == free[0])
    student = start_student(jax.random.key(0), 6)
    assert not student.blocks.down.any() and not student.head.any() and student.blocks.up.any()


def test_students_learn_and_teachers_and_temperatures_are_their_own():
    regime = dataclasses.replace(REGIMES["tied, KL"], teacher_depth=4)
    after = Toy(regime, (2,), (0.3, 1.0), 2, 32, 40, 2, faster=5.0).train()[2]
    assert after.shape == (2, 2) and len(np.unique(after)) == 4
    x = np.random.default_rng(1).normal(size=(256, WIDTH))
    for i, t in enumerate((0.3, 1.0)):
        teachers = (start_teacher(jax.random.key(seed), regime) for seed in range(4))
        assert after[:, i].max() < 0.8 * min(_untrained(teacher, x, t) for teacher in teachers)


def _untrained(teacher, x, t) -> float:
    """The loss of a student whose head is zero: log V minus the entropy of the teacher's answers."""
    blocks, head = jax.tree.map(np.float64, (teacher.blocks, teacher.head))
    x = _norm(x)
    for block in zip(*blocks, strict=True):
        x = x + _branch(x, *block)
    scores = _norm(x) @ head / t
    log_shares = scores - np.log(np.sum(np.exp(scores), axis=-1, keepdims=True))
    return np.log(head.shape[1]) + np.mean(np.sum(np.exp(log_shares) * log_shares, axis=-1))


def test_exponents_of_planted_losses():
    losses = {str(depth): [[2.0 / depth], [3.0 / depth**3]] for depth in (4, 8, 16)}
    record = Record("x", {"regime": "tied", "temperatures": [1.0]}, {}, {"losses": losses})
    found = exponents(record)[1.0]
    np.testing.assert_allclose(found.estimate, 2.0)
    assert found.low < 1.0 and found.high > 3.0


def test_verdicts():
    def summary(independent, tied, teachers=5):
        settings = dataclasses.replace(load("inverse_depth_toy").settings("cpu"), teachers=teachers)
        records = []
        for regime, power in (("independent", independent), ("tied", tied)):
            powers = power + np.linspace(-0.05, 0.05, teachers)
            losses = {str(depth): [[float(depth) ** -p] for p in powers] for depth in (6, 12, 24)}
            labels = {"regime": regime, "temperatures": [1.0]}
            records += [Record("", labels | half, {}, {"losses": losses}) for half in ({}, {"half": True})]
        return summarise(settings, records)

    verdict = lambda *powers: summary(*powers).verdict  # noqa: E731
    assert verdict(1.0, 3.0) == "supported"
    assert verdict(1.0, 1.3) == verdict(1.0, 1.0) == verdict(0.3, 3.0) == verdict(2.0, 3.0) == "not supported"
    assert verdict(1.0, 2.0) == verdict(1.5, 3.0) == "undecided"
    assert summary(1.0, 3.0, teachers=3).reasons == ["3 fresh teachers, 5 needed"]


def test_bad_settings():
    recipe = load("inverse_depth_toy")
    with pytest.raises(UserError, match="even"):
        recipe.plan(dataclasses.replace(recipe.settings("cpu"), depths=(3, 6)))
    with pytest.raises(UserError, match="known: independent"):
        recipe.plan(dataclasses.replace(recipe.settings("cpu"), regimes=("bound",)))
