"""The average of checkpoints is their mean, a run that every command opens, and has the loss that was told."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax import cli
from nagjax.data import DataConfig, prepare
from nagjax.errors import UserError
from nagjax.generate.evaluate import evaluate
from nagjax.layers.config import LoRAConfig
from nagjax.layers.lora import merged
from nagjax.report.averaging import average
from nagjax.residual import find_scheme
from nagjax.runs.config import OptimizerConfig, RunConfig, TrainConfig, to_dict
from nagjax.runs.opening import open_run
from nagjax.train.checkpoint.store import Checkpoints
from tests import tiny
from tests.tolerance import assert_close, close_to

STEPS = (10, 20, 30)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run that nobody changes, and the parameters of its checkpoints."""
    return saved(tmp_path_factory.mktemp("three"))


def saved(folder, scheme: str = "nag", freeze: tuple[str, ...] = (), **model):
    """A run with three checkpoints, each with parameters of its own, and these parameters."""
    (folder / "train.txt").write_text("it was a dark and stormy night; " * 30)
    (folder / "held.txt").write_text("the rain fell in torrents, " * 12)
    corpus, run = folder / "bytes", folder / "run"
    prepare([str(folder / "train.txt")], corpus, validation=0.0, held_out=[str(folder / "held.txt")])
    sizes = tiny.model_config(depth=2, vocab=257, context=16, **model)
    train = TrainConfig(steps=40, batch=2)
    data, optimizer = DataConfig(path=str(corpus)), OptimizerConfig(freeze=freeze)
    config = RunConfig(find_scheme(scheme)(), sizes, optimizer=optimizer, train=train, data=data)
    state, made = tiny.blueprint(config).init(0), []
    with Checkpoints(run / "checkpoints", every=10) as checkpoints:
        for step in STEPS:
            made.append(tiny.moved(state.params, 0.2, seed=step))
            checkpoints.save(step, state._replace(step=jnp.int32(step), params=made[-1]))
    (run / "config.json").write_text(json.dumps(to_dict(config)))
    return run, made


def mean(trees):
    return jax.tree.map(lambda *own: np.mean([np.asarray(one, np.float64) for one in own], 0), *trees)


def test_an_average_is_the_mean_and_a_run(three, tmp_path, capsys):
    run, made = three
    cli.run(["average", str(run), "--out", str(tmp_path / "mean"), "--batches", "2"])
    record = json.loads((tmp_path / "mean" / "average.json").read_text())
    assert record["steps"] == [*STEPS] and f"{record['loss']['average']:.4f}" in capsys.readouterr().out
    opened = open_run(tmp_path / "mean")
    assert_close(jax.device_get(opened.params), mean(made), **tiny.FORWARD)
    assert opened.step == STEPS[-1]
    assert evaluate(tmp_path / "mean", batches=2)["loss"] == close_to(record["loss"]["average"], terms=64, chain=24)
    assert evaluate(run, batches=2)["loss"] == close_to(record["loss"]["newest"], terms=64, chain=24)


@pytest.mark.parametrize("given", [{"newest": 2}, {"steps": (30, 20)}], ids=["newest", "steps"])
def test_checkpoints_are_chosen(three, given, tmp_path):
    run, made = three
    assert average(run, tmp_path / "mean", batches=1, **given)["steps"] == [20, 30]
    assert_close(jax.device_get(open_run(tmp_path / "mean").params), mean(made[1:]), **tiny.FORWARD)


@pytest.mark.parametrize("scheme", ["plain", "ngpt"])
def test_adapters_are_averaged_merged(tmp_path, scheme):
    """The mean of products is not the product of means, and no scheme's norm holds for what adapters add."""
    lora = LoRAConfig(rank=2)
    run, made = saved(tmp_path, scheme, lora=lora)
    average(run, tmp_path / "mean", batches=1)
    assert_close(jax.device_get(open_run(tmp_path / "mean").params), mean([merged(p, lora) for p in made]), **tiny.STEP)


@pytest.mark.parametrize("freeze", [(), ("head", "blocks.mlp.*")])
def test_rows_of_unit_norm_stay_so(tmp_path, freeze):
    run, _ = saved(tmp_path, "ngpt", freeze)
    average(run, tmp_path / "mean", batches=1)
    norms = np.linalg.norm(np.asarray(open_run(tmp_path / "mean").params["embedding"]["tokens"]), axis=-1)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-5)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"newest": 4}, "newest = 4: there are checkpoints of the steps 10, 20, 30"),
        ({"newest": 1}, "newest = 1: give at least 2"),
        ({"steps": (20,)}, r"steps = \[20\]: give at least 2"),
        ({"steps": (10, 15)}, "step = 15: there are checkpoints of the steps 10, 20, 30"),
        ({"steps": (10, 20), "newest": 2}, "either --steps or --newest"),
    ],
)
def test_what_cannot_be_averaged(three, given, message, tmp_path):
    with pytest.raises(UserError, match=message):
        average(three[0], tmp_path / "mean", **given)
    assert not (tmp_path / "mean").exists()


def test_a_single_checkpoint_has_no_average(three, tmp_path):
    run = shutil.copytree(three[0], tmp_path / "run")
    for step in (10, 20):
        shutil.rmtree(run / "checkpoints" / str(step))
    with pytest.raises(UserError, match="^run = .*checkpoints of the steps 30: train with --keep"):
        average(run, tmp_path / "mean")
