import json
import math

import pytest

from nagjax.errors import UserError
from nagjax.report.table import comparison_table
from nagjax.report.verdict import differences, learning_rates, one_text, same_text, scored_parts, verdict
from nagjax.runs.log import load_run
from tests.run_folders import eval_line, final_lines


@pytest.fixture
def load(make_run):
    """A run with one evaluation: `load(scheme, loss, ...)`."""

    def make(scheme: str, loss: float, *, step: int = 10, name: str | None = None, **config):
        return load_run(make_run(name or scheme, [eval_line(step, loss)], scheme=scheme, **config))

    return make


def test_the_lowest_is_ahead_whoever_it_is(load):
    plain, nag, lns = load("plain", 1.77), load("nag", 1.79), load("lns", 2.0)
    said = verdict([nag, lns, plain])
    assert "plain pre-norm is ahead" in said and "After 20.5k training tokens" in said
    assert f"{0.02 / math.log(2):.4f} bits per byte (0.0200 nats/token) better than NAG" in said
    assert "One seed per scheme" in said


def test_the_lead_over_plain_is_told_when_plain_is_not_second(load):
    said = verdict([load("plain", 2.0), load("nag", 1.7), load("lns", 1.8)])
    assert "NAG is ahead" in said
    assert "(0.1000 nats/token) better than LayerNorm Scaling and" in said
    assert "(0.3000 nats/token) better than plain pre-norm" in said


def test_runs_that_print_the_same_are_level(load):
    said = verdict([load("plain", 1.8), load("nag", 1.800001), load("lns", 2.0)])
    assert "plain pre-norm and NAG are level" in said and "ahead" not in said
    assert "(0.2000 nats/token) better than LayerNorm Scaling" in said


def test_a_run_without_a_finite_score_is_not_ranked(load):
    said = verdict([load("plain", float("nan")), load("nag", 1.9), load("lns", 1.8)])
    assert "LayerNorm Scaling is ahead" in said
    assert "plain pre-norm ended without a finite score." in said
    assert verdict([load("plain", float("nan"), name="p2")]).startswith("No run is ahead.")


def test_one_run_alone_and_two_seeds(load):
    assert "NAG reaches" in verdict([load("nag", 1.8)])
    two = [load("plain", 1.8, name="p0", seed=0), load("plain", 1.9, name="p1", seed=1)]
    assert "plain pre-norm p0 is ahead" in verdict(two) and "One seed" not in verdict(two)


def test_other_vocabularies_are_compared_in_bits_only(load):
    plain, nag = load("plain", 1.8), load("nag", 1.7)
    nag.config["model"]["vocab"] = 4096
    assert "nats/token" not in verdict([plain, nag])


def test_other_tokenizers_of_one_size_are_compared_in_bits_only(load):
    """On one text, as their documents and bytes tell."""
    plain, nag = load("plain", 1.8), load("nag", 1.7)
    for run, name in ((plain, "x"), (nag, "y")):
        known = {"tokenizer": name, "documents": 9, "bytes": 1000, "content": name}
        (run.path / "corpus.json").write_text(json.dumps(known))
    told = verdict([plain, nag])
    assert "NAG is ahead" in told and "nats/token" not in told


def test_without_an_evaluation_there_is_no_verdict(make_run):
    with pytest.raises(UserError, match="no evaluation yet"):
        verdict([load_run(make_run("a", []))])


def test_learning_rates_are_stated(load):
    plain, nag = load("plain", 1.8, lr=0.016), load("nag", 1.8, lr=0.008)
    assert "plain pre-norm 0.016 and NAG 0.008" in learning_rates([plain, nag])
    assert learning_rates([nag]) == "NAG uses the learning rate 0.008."
    assert learning_rates([nag, load("lns", 1.8, lr=0.008)]) == "Every run uses the learning rate 0.008."


def test_equal_terms_give_no_differences(load):
    assert differences([load("plain", 1.8, lr=0.016), load("nag", 1.7)]) == []


def test_a_loss_that_looks_ahead_is_named(make_run):
    """A routed run of an earlier version, which measured top-k alone, beside one that measured the causal decider."""
    runs = []
    for name, more in (("old", {}), ("new", {"causal_loss": 1.9, "causal_bits_per_byte": 2.7})):
        folder = make_run(name, [eval_line(10, 1.8) | more])
        config = json.loads((folder / "config.json").read_text())
        config["model"]["mod"] = {"rate": [0.5]}
        (folder / "config.json").write_text(json.dumps(config))
        runs.append(load_run(folder))
    assert [run.looks_ahead for run in runs] == [True, False]
    (line,) = differences(runs)
    assert line.startswith("judged: ") and "by top-k, which looks at later tokens" in line and "as sampled" in line


def test_every_differing_field_is_named(make_run):
    a = load_run(make_run("a", final_lines(2.0), scheme="plain"))
    data = {"corpus": "books", "tokenizer": "bytes", "workers": 3}
    b = load_run(make_run("b", [eval_line(20, 2.0)], scheme="nag", seed=1, depth=6, data=data))
    assert differences([a, b]) == [
        'data.corpus: plain pre-norm "stdlib", NAG "books"',
        "model.depth: plain pre-norm 4, NAG 6",
        "tokens trained: plain pre-norm 20,480, NAG 40,960",
        "train.seed: plain pre-norm 0, NAG 1",
    ]


@pytest.fixture
def on_text(make_run):
    """A run that has noted the content of its text."""

    def made(name, loss, content, path="d1", **noted):
        folder = make_run(name, [eval_line(10, loss)], scheme=name, data={"path": path})
        noted = {"tokenizer": "t", "documents": 5, "tokens": 9, "bytes": 9} | noted
        (folder / "corpus.json").write_text(json.dumps({"path": path, "content": content} | noted))
        return load_run(folder)

    return made


def test_runs_on_other_texts_are_not_ranked_wherever_these_lie(on_text):
    one, two = on_text("plain", 1.9, "a"), on_text("nag", 1.8, "b")
    assert verdict([one, two]).startswith("No run is ahead, as each has a validation text of its own: NAG has 2.59")
    assert differences([one, two]) == ['text: plain pre-norm "d1", NAG "d1" (not the same by content)']
    table = comparison_table([one, two])
    scores = [i for i, name in enumerate(table.columns) if name.startswith(("validation loss", "bits per byte"))]
    assert len(scores) == 2 and not any(row[i].best for row in table.rows for i in scores)
    moved = on_text("lns", 1.7, "a", path="elsewhere")
    assert verdict([one, moved]).startswith("After 20.5k training tokens LayerNorm Scaling is ahead")
    assert differences([one, moved]) == [] and one_text([one, moved])
    other = on_text("review", 1.6, "c", path="tokens", tokenizer="u", tokens=4)
    assert not one_text([one, other]) and same_text([one, other])
    assert "Review Residuals is ahead" in verdict([one, other])
    assert differences([one, other]) == ['text: plain pre-norm "d1", Review Residuals "tokens"']
    assert not same_text([one, other, two])


@pytest.mark.parametrize("targets, told", [(256, True), (512, False)])
def test_parts_of_a_text_by_two_tokenizers_are_told(make_run, targets, told):
    """A target of the second stands for two bytes: a quarter of as many, and it saw half of the text."""
    runs = []
    for name, bits, own in (("plain", 2.0, 512), ("nag", 4.0, targets // 2)):
        line = eval_line(10, bits * math.log(2)) | {"bits_per_byte": 2.0, "targets": own}
        folder = make_run(name, [line], scheme=name)
        noted = {"path": name, "content": name, "tokenizer": name, "documents": 5, "tokens": own, "bytes": 512}
        (folder / "corpus.json").write_text(json.dumps(noted))
        runs.append(load_run(folder))
    assert same_text(runs) and scored_parts(runs) == told
    assert ("on different parts of that text" in verdict(runs)) == told


def test_parts_of_a_text_by_another_batch_are_told(make_run):
    """With one tokenizer: `eval_batches` of twice the rows."""
    runs = []
    for name, targets in (("plain", 512), ("nag", 256)):
        folder = make_run(name, [eval_line(10, 2.0) | {"bits_per_byte": 2.0, "targets": targets}], scheme=name)
        (folder / "corpus.json").write_text(json.dumps({"path": "d", "content": "d", "documents": 5, "tokens": 512}))
        runs.append(load_run(folder))
    assert one_text(runs) and scored_parts(runs) and "on different parts of that text" in verdict(runs)


def changed(load, *names, scheme="nag", **values):
    """A run whose config has another value under these names."""
    run = load(scheme, 1.7)
    part = run.config
    for name in names:
        part = part.setdefault(name, {})
    part |= values
    return run


@pytest.mark.parametrize(
    "names, values, line",
    [
        ((), {"start": "runs/before"}, 'start: plain pre-norm "", NAG "runs/before"'),
        (("train",), {"ema": 0.99}, "train.ema: plain pre-norm 0.0, NAG 0.99"),
        (("train",), {"z_loss": 1e-4}, "train.z_loss: plain pre-norm 0.0, NAG 0.0001"),
        (("optimizer",), {"optimizer": "muon"}, 'optimizer.optimizer: plain pre-norm "adamw", NAG "muon"'),
        (("optimizer",), {"beta2": 0.99, "warmup": 0.1}, "optimizer.beta2: plain pre-norm 0.95, NAG 0.99"),
        (("optimizer",), {"rates": {"head": 0.5}}, "optimizer.rates.head: plain pre-norm 1.0, NAG 0.5"),
        (("train",), {"eval_batches": 4}, "train.eval_batches: plain pre-norm 16, NAG 4"),
    ],
)
def test_what_a_run_began_with_and_how_it_is_judged_are_compared(load, names, values, line):
    assert differences([load("plain", 1.8), changed(load, *names, **values)]) == [line]


def test_a_field_that_an_earlier_version_did_not_have_is_at_its_default(load):
    run = changed(load, "model", moe={"experts": 0}, mod={"rate": [0.0]}, rope_base=10000.0)
    plain = load("plain", 1.8)
    assert differences([plain, run]) == []
    run.config["model"]["moe"] = {"experts": 4}
    assert "model.moe.experts: plain pre-norm 0, NAG 4" in differences([plain, run])
    run.config["model"] |= {"moe": {}, "of_a_later_version": 1}
    assert "model.of_a_later_version: plain pre-norm absent, NAG 1" in differences([plain, run])


def test_an_earlier_linear_router_multiplied_by_its_score(load):
    """Where the option was absent its default is not what was done."""
    old = changed(load, "model", scheme="plain", mod={"rate": [0.5], "router": "linear"})
    new = changed(load, "model", mod={"rate": [0.5], "router": "linear", "weight": "sigmoid"})
    assert differences([old, new]) == ['model.mod.weight: plain pre-norm "score", NAG "sigmoid"']


@pytest.fixture
def no_bytes(make_run):
    """A run whose targets stand for no bytes of text."""
    return lambda name, loss: load_run(make_run(name, [eval_line(10, loss) | {"bits_per_byte": None}], scheme=name))


def test_without_bits_per_byte_runs_of_one_text_are_ranked_by_loss(no_bytes):
    said = verdict([no_bytes("plain", 1.9), no_bytes("nag", 1.8), no_bytes("lns", float("nan"))])
    assert "NAG is ahead with 1.8000 nats per token on the validation text: 0.1000 nats per token better than" in said
    assert "LayerNorm Scaling ended without a finite score." in said and "bits" not in said


def test_without_bits_per_byte_runs_of_other_texts_are_not_ranked(no_bytes, load):
    plain, nag = no_bytes("plain", 1.9), no_bytes("nag", 1.8)
    nag.config["data"]["path"] = "books"
    said = "There are no bits per byte of plain pre-norm and NAG, whose targets stand for no bytes of text."
    assert verdict([plain, nag]) == f"No run is ahead. {said}"
    said = verdict([plain, load("lns", 2.0)])
    assert "LayerNorm Scaling reaches 2.0000 nats" not in said and "LayerNorm Scaling reaches" in said
    assert said.endswith("There are no bits per byte of plain pre-norm, whose targets stand for no bytes of text.")
