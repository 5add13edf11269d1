"""AdamW by role in numpy, Muon's singular values layer by layer, and the schedules' values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.model.parametrization import Factors
from nagjax.residual import find_scheme
from nagjax.runs.config import OptimizerConfig
from nagjax.train.optimizer import check_schedule, make_optimizer, schedule
from tests.tolerance import assert_close

ROLES = {"up": "matrix", "down": "matrix", "table": "embedding", "gain": "norm", "alpha": "gate", "review": "gate"}
SHAPES = {"up": (3, 8, 16), "down": (3, 16, 8), "table": (9, 8), "gain": (3, 8), "alpha": (3,), "review": (3, 8, 8)}
STEPS, PEAK, GATE_RATE = 20, 0.01, 0.25
FACTORS = {name: Factors(role, GATE_RATE if role == "gate" else 1.0) for name, role in ROLES.items()}


def tree(seed):
    noise = np.random.default_rng(seed)
    return {name: noise.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def optimizer(**changes):
    return make_optimizer(OptimizerConfig(**changes), PEAK, STEPS, FACTORS)


def test_adamw_by_role():
    opt, params = optimizer(), tree(0)
    state = opt.init(params)
    update = jax.jit(opt.update)
    want = {name: p.astype(float) for name, p in params.items()}
    m, v = ({name: np.zeros(s) for name, s in SHAPES.items()} for _ in range(2))
    for step in range(4):
        grads = jax.tree.map(lambda g, step=step: (3.0 if step < 2 else 0.002) * g, tree(step + 1))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)

        norm = np.sqrt(sum(np.sum(g.astype(float) ** 2) for g in grads.values()))
        lr = PEAK * (step + 1) / 2 if step < 2 else PEAK * (0.1 + 0.45 * (1 + np.cos(np.pi * (step - 2) / 18)))
        for name, role in ROLES.items():
            g = grads[name].astype(float) * min(1.0, 1.0 / norm)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            d = m[name] / (1 - 0.9 ** (step + 1)) / (np.sqrt(v[name] / (1 - 0.95 ** (step + 1))) + 1e-8)
            d = d + 0.1 * want[name] if role == "matrix" else d
            want[name] = want[name] - lr * (GATE_RATE if role == "gate" else 1.0) * d
            assert_close(params[name], want[name], terms=16, chain=4 * (step + 1), err_msg=f"{name}, step {step}")


def first_updates(grads, **changes):
    opt, params = optimizer(clip=0.0, weight_decay=0.0, warmup=0.0, **changes), tree(0)
    updates, _ = jax.jit(opt.update)(grads, opt.init(params), params)
    return jax.tree.map(lambda u: np.asarray(u, float) / -PEAK, updates)


def test_muon_orthogonalises_every_layer_by_itself():
    grads = tree(1)
    updates = first_updates(grads, optimizer="muon")
    for name in ("up", "down"):
        values = np.linalg.svd(updates[name], compute_uv=False) / (0.2 * np.sqrt(16))
        raw = np.linalg.svd(grads[name], compute_uv=False)
        assert raw.max() / raw.min() > 3 and 0.6 < values.min() and values.max() < 1.3
        np.testing.assert_allclose(np.sqrt(np.mean(updates[name] ** 2, (1, 2))), 0.2, rtol=0.2)
        assert all(np.sum(u * g) > 0 for u, g in zip(updates[name], grads[name], strict=True))  # and it descends
    other = dict(grads, up=np.concatenate([100.0 * grads["down"][:1].swapaxes(1, 2), grads["up"][1:]]))
    changed = first_updates(other, optimizer="muon")
    assert_close(changed["up"][1:], updates["up"][1:], terms=16, chain=30)
    assert np.abs(changed["up"][0] - updates["up"][0]).max() > 0.1


def test_muon_leaves_everything_else_to_adam():
    muon, adam = first_updates(tree(1), optimizer="muon"), first_updates(tree(1))
    for name in ("table", "gain", "alpha", "review"):
        assert_close(muon[name], adam[name], terms=1, chain=8)
    np.testing.assert_allclose(np.abs(adam["table"]), 1.0, rtol=1e-4)
    np.testing.assert_allclose(np.abs(adam["alpha"]), GATE_RATE, rtol=1e-4)


def test_schedules():
    def rates(steps=100, **changes):
        rate = schedule(OptimizerConfig(**changes), 2.0, steps)
        return np.array([float(rate(jnp.int32(s))) for s in range(0, steps + 1, 5)])

    s = np.arange(0, 101, 5)
    rise = np.minimum((s + 1) / 10, 1.0)
    cosine = np.where(s < 10, rise, 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (s - 10) / 90)))
    assert_close(rates(), 2.0 * cosine, terms=1, chain=16)
    assert_close(rates(schedule="constant"), 2.0 * rise, terms=1, chain=16)
    wsd = np.where(s < 80, rise, 1.0 - 0.9 * (s - 80) / 20)
    assert_close(rates(schedule="wsd"), 2.0 * wsd, terms=1, chain=16)
    one = schedule(OptimizerConfig(warmup=0.0), 2.0, 1)
    assert float(one(0)) == 2.0


@pytest.mark.parametrize(
    "changes",
    [{}, {"schedule": "wsd"}, {"schedule": "wsd", "warmup": 0.5, "cooldown": 0.5},
     {"schedule": "wsd", "warmup": 0.0, "cooldown": 1.0}],
)  # fmt: skip
@pytest.mark.parametrize("steps", [7, 40])
def test_the_last_update_comes_one_step_before_the_final_rate(changes, steps):
    config = OptimizerConfig(final=0.1, **changes)
    check_schedule(config)
    rate = schedule(config, 1.0, steps)
    rates = [float(rate(step)) for step in range(steps + 1)]
    assert rates[-1] == pytest.approx(0.1) and rates[-2] > 0.1 + 1e-4 and max(rates) == 1.0


@pytest.mark.parametrize(("warmup", "cooldown"), [(0.9, 0.2), (1.0, 0.01), (0.01, 1.0)])
def test_a_warmup_and_a_cooldown_that_do_not_fit_together(warmup, cooldown):
    config = OptimizerConfig(schedule="wsd", warmup=warmup, cooldown=cooldown)  # as old runs may have it
    with pytest.raises(UserError, match=f"cooldown = {cooldown}.*at most {1 - warmup:g} is left"):
        check_schedule(config)
    least = OptimizerConfig(schedule="wsd", warmup=0.33333333, cooldown=0.7)
    with pytest.raises(UserError, match="at most 0.666666 is left"):
        check_schedule(least)
    check_schedule(dataclasses.replace(least, cooldown=0.666666))
    for other in ("cosine", "constant"):  # have no cool-down
        check_schedule(dataclasses.replace(config, schedule=other))


def test_the_default_rate_is_the_schemes_at_this_width():
    wide = ModelConfig(depth=24, width=256)
    for scheme in (find_scheme("nag")(), find_scheme("plain")()):
        assert OptimizerConfig().peak(scheme, wide) == pytest.approx(scheme.learning_rate / 4)
    deep = ModelConfig(depth=96, width=64)
    assert OptimizerConfig().peak(find_scheme("nag")(), deep) == pytest.approx(4e-3)
    assert OptimizerConfig().peak(find_scheme("plain")(), deep) == pytest.approx(8e-3)
    assert OptimizerConfig(lr=0.5).peak(find_scheme("nag")(), deep) == 0.5


@pytest.mark.parametrize("changes", [{"lr": 0.0}, {"lr": -1.0}, {"warmup": 1.5}, {"cooldown": -0.1}, {"final": 2.0}])
def test_bad_settings(changes):
    (field,) = changes
    with pytest.raises(UserError) as caught:
        OptimizerConfig(**changes)
    assert caught.value.field == field
