"""A run on a mixture whose weights change: on eight devices, stopped anywhere, it ends as if never stopped. It has all
that a run's state can hold beside it, experts with balancing biases and an average of the weights: that each alone
resumes does not show that they do together."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from nagjax.data import DataConfig, open_dataset, prepare
from nagjax.errors import UserError
from nagjax.generate.evaluate import evaluate
from nagjax.layers.config import MoEConfig
from nagjax.runs import names
from nagjax.runs.config import MeshConfig
from nagjax.runs.log import load_run
from nagjax.runs.metrics import comparable
from nagjax.train.checkpoint.store import Checkpoints
from nagjax.train.distributed.mesh import make_mesh
from nagjax.train.evaluator import Evaluator
from nagjax.train.facts import resolve
from nagjax.train.loop import train
from nagjax.train.loss import Sums
from nagjax.train.setup import set_up
from nagjax.train.state import Blueprint
from nagjax.train.step import EvalSums

WEIGHTS = ("0.9@0,0.3@0.8", "0.2")
EXPERTS = MoEConfig(4, 2, shared=1, hidden=16, bias_rate=0.01)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    made = []
    for name, words in (("foxes", "the quick brown fox jumps over it. "), ("ideas", "colourless green ideas. ")):
        folder = tmp_path_factory.mktemp(name)
        lines = [json.dumps({"text": f"{name} {i}: " + words * (2 + i % 5)}) for i in range(40)]
        (folder / "in.jsonl").write_text("\n".join(lines))
        prepare([str(folder / "in.jsonl")], folder / name, validation=0.3)
        made.append(str(folder / name))
    return made


@pytest.fixture(scope="module")
def mixed(run_of, corpora):
    def make(weights=WEIGHTS, paths=None, data=None, **train):
        mix = tuple(f"{path}={weight}" for path, weight in zip(paths or corpora, weights, strict=True))
        mesh = MeshConfig(data=2, fsdp=2, expert=2)
        config = run_of(mesh=mesh, batch=8, eval_batches=3, keep=3, ema=0.5, **train)
        model = dataclasses.replace(config.model, moe=EXPERTS)
        return dataclasses.replace(config, model=model, data=DataConfig(mix=mix, **(data or {})))

    return make


@pytest.fixture(scope="module")
def whole(mixed, tmp_path_factory):
    assert jax.device_count() == 8
    return train(mixed(), tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def half(whole, tmp_path):
    """The run as it was after two of its six steps."""
    shutil.copytree(whole, tmp_path / "half")
    for step in ("4", "6"):
        shutil.rmtree(tmp_path / "half" / names.CHECKPOINTS / step)
    return tmp_path / "half"


def state(config, folder):
    config = resolve(config)
    with Checkpoints(folder / names.CHECKPOINTS) as checkpoints:
        return jax.device_get(checkpoints.restore(Blueprint.of(config, make_mesh(config.mesh)).abstract()))


def test_resumed_on_moved_corpora_it_is_the_same_run(mixed, corpora, whole, half, tmp_path):
    moved = [shutil.copytree(path, tmp_path / "moved" / path.rpartition("/")[2]) for path in corpora]
    train(mixed(paths=moved), half)
    assert comparable(half / names.METRICS) == comparable(whole / names.METRICS)
    assert '"expert_max"' in (half / names.METRICS).read_text()
    found = state(mixed(), half)
    jax.tree.map(np.testing.assert_array_equal, found, state(mixed(), whole))
    last, average = (tree["blocks"]["mlp"]["branch"] for tree in (found.params, found.average))
    assert np.any(last["balance"] != 0) and not np.array_equal(last["down"], average["down"])


def test_what_makes_it_another_run_is_named(mixed, corpora, half):
    before = (half / names.METRICS).read_bytes()
    for config, words in (
        (mixed(("0.9@0,0.3@0.7", "0.2")), r"data.mix\[0\].weights was '0.9@0.0,0.3@0.8' and is now '0.9@0.0,0.3@0.7'"),
        (mixed(("0.9@0,0.3@0.8", "0.3")), r"data.mix\[1\].weights was '0.2' and is now '0.3'"),
        (mixed(paths=corpora[::-1]), r"data.mix\[0\].content was .*data.mix\[1\].content was"),
        (mixed(("1",), corpora[:1]), "content was"),
        (dataclasses.replace(mixed(), data=DataConfig(corpora[0])), "content was"),
        (mixed(data={"rows": "document"}), "data.rows was 'packed' and is now 'document'"),
        (mixed(data={"seed": 1}), "data.seed was 0 and is now 1"),
        (mixed(steps=8), "train.steps was 6 and is now 8"),
    ):
        with pytest.raises(UserError, match=words):
            train(config, half)
    assert (half / names.METRICS).read_bytes() == before


def test_the_corpus_of_which_nothing_counts_is_named(mixed, corpora):
    evaluator = Evaluator(set_up(mixed()).blueprint)
    found = [EvalSums(Sums(1.0, 1.0, count, 0.0), 1.0, 16, {}, None) for count in (4.0, 0.0)]
    with pytest.raises(UserError, match=f"data.mix = '{corpora[1]}=.*no target"):
        evaluator._weighed(found, [0, 1])


def test_losses_by_corpus_and_their_weighted_mean(mixed, corpora, whole):
    shares = open_dataset(mixed().data).shares
    assert shares[1] != 0.2 and sum(shares) == pytest.approx(1)
    lines = [r for r in comparable(whole / names.METRICS) if r["kind"] == "eval"]
    for line in lines:
        assert line["loss"] == pytest.approx(shares[0] * line["loss/foxes"] + shares[1] * line["loss/ideas"])
    assert load_run(whole).last_eval.loss == lines[-1]["loss"]

    scores = evaluate(whole)
    alone = [evaluate(whole, data=path) for path in corpora]
    assert [scores["loss/foxes"], scores["loss/ideas"]] == pytest.approx([one["loss"] for one in alone], rel=1e-5)
    for name in ("loss", "accuracy"):
        assert scores[name] == pytest.approx(sum(s * one[name] for s, one in zip(shares, alone, strict=True)), rel=1e-5)
    assert scores["tokens"] == sum(one["tokens"] for one in alone)
    np.testing.assert_allclose(
        scores["depth"]["turn"],
        sum(s * np.array(one["depth"]["turn"]) for s, one in zip(shares, alone, strict=True)),
        rtol=1e-4,
    )
    bytes_each = [one["loss"] / one["bits_per_byte"] for one in alone]
    mean = scores["loss"] / sum(s * b for s, b in zip(shares, bytes_each, strict=True))
    assert scores["bits_per_byte"] == pytest.approx(mean, rel=1e-5)


def test_a_changed_corpus_is_found(mixed, corpora, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    config = json.loads((run / names.CONFIG).read_text())
    config["data"]["mix"] = config["data"]["mix"][::-1]
    (run / names.CONFIG).write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"data.mix.*is not the text.*--data {corpora[1]}"):
        evaluate(run)


def test_documents_of_their_own_and_what_is_said(mixed, corpora, tmp_path, capfd):
    run = train(mixed(data={"rows": "document"}), tmp_path / "run")
    scores = evaluate(run)
    assert scores["loss/foxes"] == pytest.approx(evaluate(run, data=corpora[0])["loss"], rel=1e-5)
    assert scores["tokens"] == sum(
        open_dataset(DataConfig(path, rows="document"), split="validation").document_count * 16 for path in corpora
    ), "every document is longer than a row"
    said = capfd.readouterr().out
    foxes, ideas = open_dataset(mixed().data).shares
    assert f"of the rows: foxes {foxes:.1%} (" in said and f" times), ideas {ideas:.1%} (" in said
    assert "a document a row: 0.0% of foxes is padding, 8" in said
