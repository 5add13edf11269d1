"""The harness' requests to a run, against sums of logits; and a task of four rows through the command."""

import json
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from nagjax.data import load_tokenizer
from nagjax.errors import UserError
from nagjax.interop.importing import write_run
from nagjax.layers.config import MoEConfig
from nagjax.mod import ModConfig
from nagjax.residual import find_scheme
from nagjax.train.score import continuation_scores
from tests.interop.parity import logits_of
from tests.interop.test_export import run_of
from tests.tolerance import close_to


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny NAG run of bytes, with a context of 40."""
    folder = tmp_path_factory.mktemp("run")
    run = run_of(find_scheme("nag")(directions=3), folder, step=100, context=40)
    write_run(run, folder, {})
    (folder / "origin.json").unlink()
    return run


def by_hand(run, context, continuation):
    ids = [*context, *continuation][-(run.config.model.context + 1) :]
    padded = np.zeros((1, run.config.model.context), int)
    padded[0, : len(ids) - 1] = ids[:-1]
    logits = logits_of(run, padded)[0].astype(float)
    logs = (
        logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1)[:, None]
    )
    own = range(len(ids) - 1 - len(continuation), len(ids) - 1)
    return sum(logs[i, ids[i + 1]] for i in own), all(logs[i].argmax() == ids[i + 1] for i in own)


def test_scores_are_sums_of_logits_whatever_shares_the_batch(run):
    noise = np.random.default_rng(0)
    sizes = [(1, 1), (3, 5), (30, 9), (38, 3), (60, 7), (5, 40)]
    pairs = [tuple(noise.integers(0, 257, n).tolist() for n in size) for size in sizes]
    best = int(np.argmax([by_hand(run, pairs[1][0], [i])[0] for i in range(257)]))
    pairs.append((pairs[1][0], [best]))
    scores = continuation_scores(run, pairs, batch=4)
    for (context, continuation), (nats, greedy) in zip(pairs, scores, strict=True):
        want, was_greedy = by_hand(run, context, continuation)
        assert nats == close_to(want, terms=64, chain=24) and greedy == was_greedy
    assert scores[-1][1]
    assert continuation_scores(run, []) == []


def test_scores_refuse_what_cannot_be_scored(run):
    for pair, named in ((([], [1]), "context"), (([1], [1] * 41), "continuation"), (([1], [257]), "token = 257")):
        with pytest.raises(UserError, match=named):
            continuation_scores(run, [pair])


def test_a_routed_run_scores_causally(tmp_path):
    """What comes after a continuation does not change its score."""
    run = run_of(
        find_scheme("nag")(directions=3), tmp_path, context=40, mod=ModConfig(rate=(0.5,), decider="threshold")
    )
    run.mod["cuts"] = jax.numpy.full(run.config.model.sublayers, 0.1)
    text = np.random.default_rng(0).integers(0, 257, 40).tolist()
    parts = continuation_scores(run, [(text[:10], text[10:20]), (text[:20], text[20:]), (text[:10], text[10:])])
    assert parts[0][0] + parts[1][0] == close_to(parts[2][0], terms=64, chain=24)


def test_a_score_does_not_depend_on_what_else_is_scored(tmp_path):
    """Experts have room for every choice, as when a text is written; the longer pair is padded to more tokens."""
    moe = MoEConfig(8, 2, dispatch="capacity", capacity=0.5)
    run = run_of(find_scheme("plain")(), tmp_path, context=128, moe=moe)
    noise = np.random.default_rng(0)
    short, long = ((noise.integers(32, 127, n).tolist(), noise.integers(32, 127, 6).tolist()) for n in (8, 100))
    alone, beside = continuation_scores(run, [short]), continuation_scores(run, [short, long])
    assert alone[0][0] == close_to(beside[0][0], terms=64, chain=24)
    assert np.isclose(alone[0][0], _nats(run.logits, short), rtol=1e-4)


def _nats(logits, pair) -> float:
    ids = [*pair[0], *pair[1]]
    logs = jax.nn.log_softmax(logits(bytes(ids).decode()))
    return float(sum(logs[i - 1, ids[i]] for i in range(len(pair[0]), len(ids))))


def test_without_the_harness_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    from nagjax.cli import main

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "nagjax.interop.lm_eval", raising=False)
    assert main(["eval", str(tmp_path), "--tasks", "any"]) == 2
    assert "pip install -e '.[eval]'" in capsys.readouterr().err


def request(*args):
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def harness(run):
    pytest.importorskip("lm_eval", reason="needs the extra eval: make test-eval")
    from nagjax.interop.lm_eval import NagjaxLM

    return NagjaxLM(run, batch=3)


def test_loglikelihood_and_rolling(run, harness):
    texts = [("def f", "(x):"), ("", "import"), ("a ", "b")]
    scores = harness.loglikelihood([request(*pair) for pair in texts], disable_tqdm=True)
    encode = lambda text: list(text.encode())  # noqa: E731
    assert scores[0][0] == close_to(by_hand(run, encode("def f"), encode("(x):"))[0], terms=64, chain=24)
    assert scores[1][0] == close_to(by_hand(run, [256], encode("import"))[0], terms=64, chain=24)
    assert scores[2][0] == close_to(by_hand(run, encode("a"), encode(" b"))[0], terms=64, chain=24)

    text = "the quick brown fox jumps over the lazy dog, twice over"
    ids = encode(text)
    rolled = harness.loglikelihood_rolling([request(text), request("ab")])
    first, rest = by_hand(run, [256], ids[:40])[0], by_hand(run, ids[:40], ids[40:])[0]
    assert rolled[0] == close_to(first + rest, terms=64, chain=24)
    assert rolled[1] == close_to(by_hand(run, [256], encode("ab"))[0], terms=64, chain=24)


def test_a_continuation_that_merged_with_its_context_has_a_token(run, harness, monkeypatch):
    """Nobody's is the sum of no tokens, which is the best there is."""
    merged = {"3": [51], "34": [257 - 1], "": []}
    encode_batch = lambda texts: [np.array(merged.get(text, list(text.encode()))) for text in texts]  # noqa: E731
    monkeypatch.setattr(run.tokenizer, "encode_batch", encode_batch)
    assert harness._encode_pair("3", "4") == ([51], [256])
    assert harness._encode_pair("  ", "a") == ([256], list(b"  a"))
    scores = harness.loglikelihood([request("3", "4"), request("\n", "b")], disable_tqdm=True)
    assert all(nats < 0 for nats, _ in scores)


def test_generate_until_stops_where_it_is_told_to(harness):
    greedy = {"until": [], "max_gen_toks": 8, "do_sample": False}
    whole, again = harness.generate_until([request("x = ", greedy), request("x" * 90, greedy)])
    assert 0 < len(whole.encode()) and isinstance(again, str)
    stop = whole[1:3]
    cut = harness.generate_until([request("x = ", greedy | {"until": [stop, "never to be found"]})])
    assert cut == [whole[: whole.find(stop)]]


def test_repeats_of_a_request_are_drawn_apart(harness):
    """In whatever batch they are: tasks ask for 64 answers and count the ones that agree, or pass."""
    sampled = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 5.0}
    answers = harness.generate_until([request("x = ", sampled)] * 9)
    assert len({*answers}) == 9 and answers == harness.generate_until([request("x = ", sampled)] * 9)
    greedy = harness.generate_until([request("x = ", sampled | {"do_sample": False})])
    assert harness.generate_until([request("x = ", sampled | {"top_k": 1})]) == greedy


def test_fewer_new_tokens_than_a_task_asks_for_are_told(run, harness, capsys):
    harness.generate_until([request("x", {"max_gen_toks": 30, "do_sample": False})] * 2)
    assert capsys.readouterr().err.count("a task asks for 30 new tokens: 20 are written") == 1
    assert harness.shortened == {30: 20}


def test_the_command_runs_a_task_of_ones_own(run, harness, tmp_path, capsys):
    from nagjax.cli import main

    rows = [{"question": f"Is {i} even?", "choices": ["yes", "no"], "answer": i % 2} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "even.yaml").write_text(
        f"""
task: nagjax_even
dataset_path: json
dataset_kwargs:
  data_files:
    test: {tmp_path / "rows.jsonl"}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
    )
    args = ["eval", str(run.folder), "--tasks", "nagjax_even", "--task-folder", str(tmp_path)]
    assert main([*args, "--as-json"]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    right = []
    for row in rows:
        question = list(row["question"].encode())
        found = [by_hand(run, question, list(f" {choice}".encode()))[0] for choice in row["choices"]]
        right.append(int(np.argmax(found)) == row["answer"])
    assert scores["nagjax_even"]["acc,none"] == pytest.approx(np.mean(right))
    record = json.loads((run.folder / "tasks.json").read_text())
    assert record["n-samples"]["nagjax_even"]["effective"] == 4 and record["step"] == 100
    assert main(["eval", str(run.folder), "--tasks", "no_such_task"]) == 2
    assert "no_such_task" in capsys.readouterr().err


def test_what_a_tokenizer_puts_in_front_goes_in_front(tmp_path):
    from tokenizers import Tokenizer, processors

    from nagjax.interop.tokenizer_files import byte_level_json

    engine = Tokenizer.from_str(byte_level_json())
    (tmp_path / "plain.json").write_text(engine.to_str())
    engine.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    (tmp_path / "front.json").write_text(engine.to_str())
    assert load_tokenizer(str(tmp_path / "plain.json")).in_front == []
    assert load_tokenizer(str(tmp_path / "front.json")).in_front == [256]
    assert load_tokenizer(str(tmp_path / "front.json")).encode("a").tolist() == [97]
