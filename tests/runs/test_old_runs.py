"""Run folders and a bundle that an earlier version wrote (commit 7149dd9) open, give the same logits, and train on.

`tests/old_runs`: 2 blocks x 16, 8 steps. nag: Mixture-of-Depths at rate 0.25, its checkpoint of step 4 and the log of
all 8 steps; plain: one table for embedding and head, finished; nag_bundle: an export of nag. `expected.npz` in a run
holds `tokens` [2, 32], the `logits` of every fourth of them (by the causal decider where there is one), and the
`train_loss` of all steps, from that version on one CPU.
"""

import dataclasses
import json
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

import nagjax
from nagjax.layers.where import Where
from nagjax.runs.config import MeshConfig
from nagjax.runs.folder import read_config
from nagjax.train.loop import train

OLD = Path(__file__).parents[1] / "old_runs"
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """Unpacks runs into the working directory: their corpus has a relative path."""
    monkeypatch.chdir(tmp_path)

    def unpack(name: str) -> Path:
        with zipfile.ZipFile(OLD / f"{name}.zip") as archive:
            archive.extractall("." if name == "corpus" else name)
        return Path(name)

    return unpack


def logits(run, tokens):
    options = {"cuts": run.mod["cuts"], "causal": True} if run.config.model.mod.active else {}
    model, where = run.model, Where.whole(*tokens.shape)
    return jax.jit(lambda tokens: model.logits(model(tokens, where, progress=run.progress, **options)))(tokens)


@pytest.mark.parametrize("name", ["nag", "plain"])
def test_a_run_folder_gives_the_logits_it_gave(unpacked, name):
    folder = unpacked(name)
    expected = np.load(folder / "expected.npz")
    run = nagjax.load(folder)
    assert run.step == {"nag": 4, "plain": 8}[name]
    np.testing.assert_allclose(logits(run, expected["tokens"])[:, ::4], expected["logits"], **CLOSE)


def test_a_bundle_gives_the_logits_of_its_run(unpacked):
    expected = np.load(unpacked("nag") / "expected.npz")
    run = nagjax.load(unpacked("nag_bundle"))
    np.testing.assert_allclose(logits(run, expected["tokens"])[:, ::4], expected["logits"], **CLOSE)


def test_a_run_goes_on_as_it_went(unpacked):
    """Optimizer, cuts, position in the data and log are right if the losses after its checkpoint are the same."""
    unpacked("corpus")
    folder = unpacked("nag")
    expected = np.load(folder / "expected.npz")["train_loss"]
    train(dataclasses.replace(read_config(folder), mesh=MeshConfig(data=1)), folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
    assert sorted(steps) == list(range(1, 9)) and nagjax.load(folder).step == 8
    np.testing.assert_allclose([steps[step] for step in range(1, 9)], expected, **CLOSE)
