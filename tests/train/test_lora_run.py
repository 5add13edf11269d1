"""Runs that train adapters: they begin as the model they adapt, leave it as it is, resume to the bit, and merge."""

import dataclasses
import gc
import json
import shutil

import jax
import numpy as np
import optax
import pytest

from nagjax.errors import UserError
from nagjax.generate.evaluate import evaluate
from nagjax.layers.config import LoRAConfig, MoEConfig
from nagjax.residual import find_scheme
from nagjax.runs import names
from nagjax.runs.config import DEFAULT_SCHEME, MeshConfig
from nagjax.runs.folder import read_config
from nagjax.runs.log import load_run
from nagjax.runs.metrics import comparable
from nagjax.runs.opening import open_run
from nagjax.train import warm_start
from nagjax.train.checkpoint.store import Checkpoints, steps_saved
from nagjax.train.loop import train
from nagjax.train.setup import set_up
from nagjax.train.warm_start import begin
from tests.tolerance import close_to

SUM = {"terms": 64, "chain": 100}


@pytest.fixture(scope="module")
def base(run_of, tmp_path_factory):
    """Of experts with balancing biases."""
    config = run_of(lr=0.02)
    experts = MoEConfig(4, 2, shared=1, hidden=16, bias_rate=0.01)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, moe=experts))
    return train(config, tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def adapted_config(run_of, base):
    config = run_of(lr=0.02, mesh=MeshConfig(data=2, fsdp=2, tensor=2), keep=3, ema=0.5)
    model = dataclasses.replace(config.model, lora=LoRAConfig(rank=2))
    return dataclasses.replace(config, model=model, start=str(base))


@pytest.fixture(scope="module")
def whole(adapted_config, tmp_path_factory):
    return train(adapted_config, tmp_path_factory.mktemp("lora") / "whole")


def state_of(folder):
    blueprint = set_up(read_config(folder)).blueprint
    with Checkpoints(folder / names.CHECKPOINTS) as checkpoints:
        return jax.device_get(checkpoints.restore(blueprint.abstract(), 6))


def losses_of(folder):
    return [line["loss"] for line in map(json.loads, (folder / names.METRICS).open()) if line["kind"] == "eval"]


def test_a_resumed_run_on_eight_devices_is_the_unbroken_one(whole, adapted_config, tmp_path):
    shutil.copytree(whole, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / names.CHECKPOINTS / "6")
    half = train(adapted_config, tmp_path / "half")
    assert comparable(half / names.METRICS) == comparable(whole / names.METRICS)
    found = state_of(half)
    jax.tree.map(np.testing.assert_array_equal, found, state_of(whole))
    last, average = (tree["blocks"]["mlp"]["lora"]["down"]["b"] for tree in (found.params, found.average))
    assert not np.array_equal(last, average)


def test_adapters_learn_and_their_model_stays(whole, base):
    first, *_, last = losses_of(whole)
    assert first == close_to(load_run(base).last_eval.loss, **SUM) and last < first - 0.01
    start, state = open_run(base).params, state_of(whole)
    for kind, own in state.params["blocks"].items():
        for got, want in zip(*map(jax.tree.leaves, (own["branch"], start["blocks"][kind]["branch"])), strict=True):
            np.testing.assert_array_equal(got, want)
    assert np.any(start["blocks"]["mlp"]["branch"]["balance"] != 0), "which are not moved any more"
    assert float(np.abs(state.params["blocks"]["mlp"]["lora"]["up"]["b"]).max()) > 0.0


def test_an_opened_run_is_the_merged_model(whole, run_of):
    run = open_run(whole)
    assert run.config.model.lora.rank == 0
    assert all("lora" not in own for own in run.params["blocks"].values())
    assert evaluate(whole, batches=1)["loss"] == close_to(load_run(whole).last_eval.loss, **SUM)
    blueprint = set_up(dataclasses.replace(run_of(), start=str(whole))).blueprint
    assert blueprint.config.model.lora.rank == 0
    for got, want in zip(*map(jax.tree.leaves, (begin(blueprint).params, run.params)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_start_holds_its_parameters_once(adapted_config, base, monkeypatch):
    """Besides what is trained and their average. And adapters start as they would without a start."""
    blueprint = set_up(dataclasses.replace(adapted_config, mesh=MeshConfig(data=1))).blueprint
    adapters = lambda params: {kind: own["lora"] for kind, own in params["blocks"].items()}  # noqa: E731
    fresh = jax.jit(lambda: adapters(blueprint.init_params(blueprint.config.train.seed)))()
    fresh = jax.device_get(fresh)
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    read, alive = warm_start.read_weights, []

    def watched(*args):
        found = read(*args)
        gc.collect()
        alive.append(sum(a.nbytes for a in jax.live_arrays() if id(a) not in before))
        return found

    monkeypatch.setattr(warm_start, "read_weights", watched)
    state = begin(blueprint)
    held = sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert alive[0] <= held, "nothing but the weights that were read"
    jax.tree.map(np.testing.assert_array_equal, adapters(jax.device_get(state.params)), fresh)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.average), jax.device_get(state.params))


def test_what_is_given_beside_a_start_in_vain_is_told(run_of, base, capsys):
    own = read_config(base).scheme.name
    for scheme in ("highway", own, DEFAULT_SCHEME):
        set_up(dataclasses.replace(run_of(), start=str(base), scheme=find_scheme(scheme)()))
        assert ("not used of what is given: scheme" in capsys.readouterr().err) == (scheme == "highway")


def test_that_the_first_step_will_normalise_merged_matrices_is_told(run_of, tmp_path, capsys):
    """Of nGPT, whose matrices have unit length until adapters are added to them."""
    config = run_of(lr=0.1, scheme="ngpt")
    base = train(config, tmp_path / "base")
    with_adapters = dataclasses.replace(config.model, lora=LoRAConfig(rank=2))
    adapted = train(dataclasses.replace(config, model=with_adapters, start=str(base)), tmp_path / "adapted")
    assert "projects its parameters" not in capsys.readouterr().err
    for start, told in ((base, False), (adapted, True)):
        blueprint = set_up(dataclasses.replace(config, start=str(start))).blueprint
        params = begin(blueprint).params
        said = capsys.readouterr().err
        assert ("nGPT projects its parameters" in said and str(start) in said) == told
    change = jax.tree.map(np.subtract, blueprint.constrained(params), params)
    share = float(optax.tree.norm(change) / optax.tree.norm(params))
    assert f"by {share:.1%}" in said and share > 0.01


def test_a_start_that_is_refused_deletes_nothing(base, whole, adapted_config, tmp_path):
    """--fresh, over the run to start from, and from a run whose checkpoints are gone."""
    with pytest.raises(UserError, match="out = .*is the run to start from"):
        train(adapted_config, base, fresh=True)
    shutil.copytree(base, tmp_path / "bare", ignore=shutil.ignore_patterns(names.CHECKPOINTS))
    with pytest.raises(UserError, match="start = .*no checkpoint"):
        train(dataclasses.replace(adapted_config, start=str(tmp_path / "bare")), whole, fresh=True)
    assert all(6 in steps_saved(folder / names.CHECKPOINTS) for folder in (base, whole))


def test_adapters_need_a_model(adapted_config):
    with pytest.raises(UserError, match=r"lora\.rank = 2: .*--start"):
        set_up(dataclasses.replace(adapted_config, start=""))
