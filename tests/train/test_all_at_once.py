"""All that a run's state can hold, together: that each alone resumes does not show that they do beside each other."""

import dataclasses
import json
import signal

import jax
import numpy as np
import pytest

from nagjax.data import DataConfig, prepare
from nagjax.layers.config import LoRAConfig, MoEConfig
from nagjax.runs import names
from nagjax.runs.config import MeshConfig
from nagjax.runs.metrics import comparable
from nagjax.train.checkpoint.store import Checkpoints, steps_saved
from nagjax.train.loop import train
from nagjax.train.setup import set_up


@pytest.fixture(scope="module")
def config(run_of, corpus, tmp_path_factory):
    """Dropless experts with balancing biases, an average of the weights, and two corpora of changing weights."""
    folder = tmp_path_factory.mktemp("ideas")
    texts = [f"idea {i}: " + "colourless green ideas sleep. " * (2 + i % 5) for i in range(30)]
    (folder / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare([str(folder / "in.jsonl")], folder / "ideas", validation=0.3)
    mix = (f"{corpus}=0.9@0,0.3@0.8", f"{folder / 'ideas'}=0.2")
    made = run_of(batch=8, eval_batches=2, ema=0.5, mesh=MeshConfig(data=2, fsdp=2, expert=2))
    experts = MoEConfig(4, 2, shared=1, hidden=16, bias_rate=0.01)
    return dataclasses.replace(made, model=dataclasses.replace(made.model, moe=experts), data=DataConfig(mix=mix))


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    return train(config, tmp_path_factory.mktemp("all") / "whole")


def state_of(config, folder):
    with Checkpoints(folder / names.CHECKPOINTS) as checkpoints:
        return jax.device_get(checkpoints.restore(set_up(config).blueprint.abstract(), 6))


@pytest.mark.parametrize("adapters", [False, True], ids=["all", "lora"])
def test_interrupted_and_resumed_it_is_the_unbroken_run(adapters, config, whole, tmp_path):
    """Before its second evaluation, which the resumed run owes. With LoRA it starts from the run without."""
    if adapters:
        model = dataclasses.replace(config.model, lora=LoRAConfig(rank=2))
        config = dataclasses.replace(config, model=model, start=str(whole))
        whole = train(config, tmp_path / "whole")

    def interrupt(record, run):
        if (record["kind"], run.step) == ("train", 3):
            signal.raise_signal(signal.SIGINT)

    half = tmp_path / "half"
    with pytest.raises(KeyboardInterrupt):
        train(config, half, callback=interrupt)
    assert max(steps_saved(half / names.CHECKPOINTS)) == 3
    assert [record["step"] for record in comparable(half / names.METRICS) if record["kind"] == "eval"] == [0]
    train(config, half)
    assert comparable(half / names.METRICS) == comparable(whole / names.METRICS)
    state, want = state_of(config, half), state_of(config, whole)
    jax.tree.map(np.testing.assert_array_equal, state, want)

    record = next(record for record in comparable(half / names.METRICS) if record["kind"] == "eval")
    assert {"loss/corpus", "loss/ideas"} <= record.keys()
    last, average = (tree["blocks"]["mlp"] for tree in (state.params, state.average))
    assert np.any(last["branch"]["balance"] != 0)
    moved = ("lora", "down", "b") if adapters else ("branch", "down")
    for name in moved:
        last, average = last[name], average[name]
    assert not np.array_equal(last, average)
