"""Evaluation against a recomputation from the documents."""

import json
import math

import jax
import numpy as np
import pytest

from nagjax.data import open_dataset, prepare, train_bpe
from nagjax.data.rows import Rows
from nagjax.errors import UserError
from nagjax.generate.evaluate import evaluate
from nagjax.layers.attention import Where
from nagjax.runs.opening import open_run
from tests.tolerance import close_to


@pytest.fixture(scope="module")
def scores(run_folder):
    return evaluate(run_folder)


def test_every_validation_token_counts_once(scores, run_folder):
    run = open_run(run_folder)
    dataset = open_dataset(run.config.data, split="validation")
    rows = Rows(dataset.stream, 40, 256)
    nats = correct = count = 0
    forward = jax.jit(lambda tokens, where: run.model.logits(run.model(tokens, where, progress=run.progress)))
    for index in range(len(rows)):
        row = rows[index]
        where = Where(row["segment_ids"][None], row["positions"][None])
        logits = np.asarray(forward(row["tokens"][None], where)[0], np.float64)
        log_likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        real = row["weights"] > 0
        nats -= log_likely[np.arange(40), row["targets"]][real].sum()
        correct += (logits.argmax(-1) == row["targets"])[real].sum()
        count += real.sum()
    assert scores["tokens"] == count == dataset.token_count
    assert scores["step"] == run.step
    assert scores["loss"] == close_to(nats / count, terms=64, chain=24)
    assert scores["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert scores["bits_per_byte"] == close_to(nats / math.log(2) / dataset.byte_count, terms=64, chain=24)
    assert scores["accuracy"] == pytest.approx(correct / count)


def test_telemetry_is_per_sublayer(scores):
    depth = scores["depth"]
    assert {name: len(values) for name, values in depth.items()} == {
        name: 4 + (name == "log_norm") for name in ("turn", "ratio", "growth", "log_norm", "gate", "closed")
    }
    # The two lanes agree: NAG turns by arctan |t| and grows by log(1 + t^2) / 2.
    np.testing.assert_allclose(np.diff(depth["log_norm"]), depth["growth"], atol=1e-5)
    assert all(0 < gate < 1 for gate in depth["gate"])


def test_some_batches_only(run_folder, scores):
    some = evaluate(run_folder, batches=2)
    assert some["tokens"] <= 2 * 2 * 40 < scores["tokens"]
    with pytest.raises(UserError, match="at least 1"):
        evaluate(run_folder, batches=0)


def test_another_corpus(run_folder, scores, tmp_path):
    (tmp_path / "other.txt").write_text("quite another text. " * 20)
    inputs = [str(tmp_path / "other.txt")]
    prepare(inputs, tmp_path / "other", validation=0.0, held_out=inputs)
    other = evaluate(run_folder, data=str(tmp_path / "other"))
    assert other["tokens"] == 401
    assert other["loss"] != scores["loss"]


def test_the_standard_library_as_another_corpus(run_folder):
    assert evaluate(run_folder, data="stdlib", batches=1)["tokens"] == 80


def test_a_corpus_of_another_tokenizer(run_folder, corpus, tmp_path):
    text = str(corpus.parent / "train.txt")
    train_bpe([text], 270, tmp_path / "bpe.json")
    prepare([text], tmp_path / "bpe", tokenizer=str(tmp_path / "bpe.json"), validation=0.0, held_out=[text])
    with pytest.raises(UserError, match="prepare it with") as error:
        evaluate(run_folder, data=str(tmp_path / "bpe"))
    assert error.value.field == "data"


def test_an_absent_corpus(run_folder, tmp_path):
    with pytest.raises(UserError, match="data = '.*nowhere"):
        evaluate(run_folder, data=str(tmp_path / "nowhere"))


def test_scores_are_json(scores):
    assert json.loads(json.dumps(scores)) == scores
