import numpy as np
import pytest

from experiments.harness.jobs import Training
from experiments.harness.matching import parameters, ratio, step_seconds, train_flops, widened, with_flops, with_steps
from experiments.harness.timed import MEASURED, TimeMatched
from nagjax.errors import UserError
from nagjax.layers.config import MoEConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig, TrainConfig


def _config(scheme: str, **model) -> RunConfig:
    model = ModelConfig(**dict(depth=2, width=16, context=16) | model)
    return RunConfig(find_scheme(scheme)(), model, train=TrainConfig(steps=50, batch=2))


def test_equal_flops():
    plain, review = _config("plain"), _config("review")
    matched = with_flops(plain, train_flops(review))
    assert matched.train.steps > review.train.steps
    np.testing.assert_allclose(train_flops(matched), train_flops(review), rtol=0.5 / matched.train.steps)


def test_equal_parameters_is_the_narrowest_that_reaches_them():
    plain, review = _config("plain", positions="learned"), _config("review", positions="learned")
    matched = widened(plain, parameters, parameters(review))
    heads = plain.model.heads
    assert matched.model.width % heads == 0 and matched.model.heads == heads
    assert matched.model.hidden == ModelConfig(depth=2, width=matched.model.width, context=16).hidden
    narrower = ModelConfig(2, matched.model.width - heads, heads, context=16, positions="learned")
    before = RunConfig(plain.scheme, narrower, train=plain.train)
    assert parameters(before) < parameters(review) <= parameters(matched)
    with pytest.raises(UserError, match="width"):
        widened(plain, lambda config: 0.0, 1.0)


def test_experts_follow_the_width():
    moe = MoEConfig(experts=4)
    model = widened(_config("plain", moe=moe), lambda config: config.model.width, 24).model
    assert model == ModelConfig(depth=2, width=24, heads=model.heads, context=16, moe=moe)


def test_steps_are_at_least_one():
    assert with_steps(_config("plain"), 0).train.steps == 1


def test_a_run_matched_by_time_takes_the_steps_that_fit_into_the_other_s(tmp_path, monkeypatch):
    """Whose step takes half of its own."""
    (tmp_path / MEASURED).write_text('{"own": [2.0, 4.0], "other": [1.0, 2.0]}')
    ran = []
    monkeypatch.setattr(Training, "run", lambda self, folder: ran.append(self.run_config.train.steps) or {})
    TimeMatched("x", {}, _config("plain"), _config("nag")).run(tmp_path)
    assert ran == [25]


def test_steps_are_timed_in_turn_and_compared_round_by_round():
    times = step_seconds({"own": _config("plain"), "other": _config("nag")}, rounds=2)
    assert {name: len(own) for name, own in times.items()} == {"own": 2, "other": 2}
    assert ratio([2.0, 30.0, 4.0], [1.0, 10.0, 2.0]) == 2.0
