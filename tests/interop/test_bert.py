"""BERT for looking: padding, kinds of tokens, what is left out of its files, and what an encoder cannot do."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nagjax
from nagjax import cli
from nagjax.data.preparation import prepare
from nagjax.errors import UserError
from nagjax.generate.sample import generate
from nagjax.interop.exporting import export
from nagjax.interop.source import read_source
from nagjax.layers.config import BlockConfig, OtherBlocks
from nagjax.layers.embedding import unembed
from nagjax.layers.where import Where
from nagjax.measure.masked import masked
from nagjax.mod import ModConfig
from nagjax.report.curve import text_batches
from nagjax.residual import find_scheme
from nagjax.runs.facts import model_costs, parameters_by_part
from nagjax.train.head_loss import head_loss
from nagjax.train.loss import Batch, cross_entropy
from nagjax.train.score import continuation_scores
from nagjax.train.step import train_step
from tests import tiny
from tests.interop.parity import TOLERANCE, logits_of
from tests.interop.test_export import PLAIN, run_of
from tests.interop.test_sources import configured, rewritten

SCHEME, SHAPE = PLAIN["bert"]


@pytest.fixture
def encoder(tmp_path):
    return run_of(find_scheme(SCHEME)(), tmp_path, **SHAPE)


def logits(run, tokens, where, types=None):
    return np.asarray(run.model.logits(run.model(jnp.asarray(tokens), where, types=types)))


@pytest.mark.parametrize("case", ["bert", "bert_untied"])
def test_padding_and_kinds_of_tokens_are_those_of_transformers(reference, case):
    tokens = reference.tokens(case)
    real = (np.arange(tokens.shape[1]) < np.array([[17], [24]])).astype(np.int64)
    kinds = (np.arange(tokens.shape[1]) >= np.array([[9], [5]])).astype(np.int64)
    want = reference.load(reference.folder / case, tokens, attention_mask=real, token_type_ids=kinds)
    whole, types = Where.whole(*tokens.shape), jnp.asarray(kinds, jnp.int32)
    where = whole._replace(segments=jnp.asarray(real, jnp.int32))
    run = read_source(reference.folder / case)
    assert np.abs(logits(run, tokens, where, types) - want)[real > 0].max() < TOLERANCE
    for changed in ((whole, types), (where, None)):
        assert np.abs(logits(run, tokens, *changed) - want)[real > 0].max() > 100 * TOLERANCE


def test_a_token_sees_all_of_its_document_and_nothing_else(encoder):
    tokens = np.random.default_rng(0).integers(0, 257, (1, 12)).astype(np.int32)
    where = Where(jnp.array([[1] * 5 + [2] * 7]), jnp.array([[*range(5), *range(7)]]))
    before = logits(encoder, tokens, where)
    tokens[0, 11] += 1
    change = np.abs(logits(encoder, tokens, where) - before).max(axis=-1)[0]
    assert not change[:5].any() and change[5:].min() > 1e-4


def test_all_keys_and_the_head_s_map_are_counted(encoder):
    model = dataclasses.replace(encoder.config.model, causal=True, head_epsilon=None)
    plain = tiny.blueprint(dataclasses.replace(encoder.config, model=model))
    more, less = model_costs(encoder.blueprint), model_costs(plain)
    later = (model.context - 1) / 2  # keys after the query, on average
    assert more.forward - less.forward == 2 * (model.width**2 + model.depth * 2 * model.width * later)
    parts, without = parameters_by_part(encoder.blueprint), parameters_by_part(plain)
    assert parts.pop("head") == model.width**2 + 3 * model.width + model.vocab and not without.pop("head")
    assert parts == without


def test_a_loss_in_chunks_knows_the_bias_of_the_head(encoder):
    batch = Batch(*map(jnp.asarray, tiny.packed_batch(tokens=16, vocab=257)))
    output = encoder.model(batch.tokens, batch.where)
    _, sums = head_loss(encoder.model, output, batch, chunk=4)
    chex.assert_trees_all_equal(sums, cross_entropy(encoder.model.logits(output), batch))
    plain = cross_entropy(unembed(output.hidden, output.log_scale, encoder.model.head_rows()), batch)
    assert abs(sums.nats - plain.nats) > 1e-3 * plain.nats


def test_kinds_of_tokens_that_a_model_has_not_are_refused():
    blueprint, tokens = tiny.blueprint(tiny.run_config(find_scheme("plain")())), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(UserError, match=r"types = \(1, 4\): the model has no token types"):
        jax.eval_shape(lambda: blueprint.model(blueprint.init_params(0))(tokens, types=tokens).hidden)


def test_what_the_logits_do_not_depend_on_is_left_out(encoder, tmp_path):
    """The files of the first BERT: old names of gains and biases, a pooler, a second head, numbers of positions, the
    table twice."""
    export(encoder, tmp_path / "model")
    tokens = np.random.default_rng(0).integers(0, 257, (1, 12))
    want = logits_of(read_source(tmp_path / "model"), tokens)

    def as_first(own):
        named = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for name, value in own.items()
        }
        extra = {
            "bert.pooler.dense.weight": np.ones((16, 16), np.float32),
            "bert.embeddings.position_ids": np.arange(16),
        }
        extra |= {"cls.seq_relationship.bias": np.ones(2, np.float32)}
        extra |= {"cls.predictions.decoder.weight": own["bert.embeddings.word_embeddings.weight"]}
        extra |= {"cls.predictions.decoder.bias": own["cls.predictions.bias"]}
        return named | {name: np.asarray(value, np.float32) for name, value in extra.items()}

    rewritten(tmp_path / "model", as_first)
    np.testing.assert_array_equal(logits_of(read_source(tmp_path / "model"), tokens), want)


@pytest.fixture
def headless(encoder, tmp_path):
    """The folder of a BertModel: names without a prefix, a pooler, no head."""
    export(encoder, tmp_path / "bare")

    def bare(own):
        kept = {name.removeprefix("bert."): value for name, value in own.items() if not name.startswith("cls.")}
        return kept | {"pooler.dense.bias": np.zeros(16, np.float32)}

    return configured(rewritten(tmp_path / "bare", bare), architectures=["BertModel"])


def test_an_encoder_without_a_head_has_the_hidden_states(encoder, headless, tmp_path):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 257, (2, 12)))
    run = read_source(headless)
    hidden = run.model(tokens).hidden
    through = encoder.model(tokens)._replace(hidden=encoder.model.transform(hidden))
    np.testing.assert_array_equal(encoder.model.logits(through), encoder.model.logits(encoder.model(tokens)))
    export(run, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == ["BertModel"]
    np.testing.assert_array_equal(read_source(tmp_path / "again").model(tokens).hidden, hidden)


def test_an_encoder_without_a_head_says_so_where_logits_are_wanted(headless, capsys):
    with pytest.raises(UserError, match="head_epsilon = None: run.logits needs a head for masked tokens"):
        read_source(headless).logits("a")
    run = headless.parent / "run"
    assert cli.main(["import", str(headless), "--out", str(run)]) == 0
    assert cli.main(["map", str(run), "--text", "a text"]) == 0
    for words in (["diagnose", str(run)], ["prune", str(run), "--out", str(run.parent / "less"), "--blocks", "1"]):
        assert cli.main(words) == 2 and "needs a head for masked tokens" in capsys.readouterr().err
    configured(headless, architectures=["BertForMaskedLM"])
    with pytest.raises(UserError, match=r"cls\.predictions.*missing: the files are not complete"):
        read_source(headless)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda run: generate(run.model, [[1, 2]], tokens=2), "generation"),
        (lambda run: continuation_scores(run, [([1], [2])]), "scoring continuations"),
        (lambda run: run.model.empty_cache(1, 8), "a cache"),
        (lambda run: train_step(run.blueprint), "training"),
    ],
    ids=["generate", "score", "cache", "train"],
)
def test_what_needs_causal_attention_says_so(encoder, use, what):
    with pytest.raises(
        UserError, match=f"causal = False: {what}.*needs a model that sees no later tokens; use run.model"
    ):
        use(encoder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mod": ModConfig(rate=(0.5,))}, r"mod.rate = \(0.5,\): with causal = False: Mixture-of-Depths"),
        ({"block": BlockConfig(window=4)}, "block.window = 4: with causal = False"),
        ({"block": BlockConfig(others=OtherBlocks((1,), 4))}, "block.others.window = 4: with causal = False"),
        ({"block": BlockConfig(cca=True)}, "block.cca = True: with causal = False"),
    ],
)
def test_parts_that_look_back_are_refused(changes, named):
    with pytest.raises(UserError, match=named):
        tiny.model_config(causal=False, **changes)


WORDS = "the a of river stone cold runs over small old deep water ##s ##ing".split()


def word_pieces(path):
    """BERT's kind of tokenizer, with few words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: i for i, token in enumerate([*special, *WORDS])}
    engine = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    engine.normalizer, engine.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    engine.add_special_tokens(special)
    engine.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    engine.save(str(path))


@pytest.fixture
def imported(tmp_path):
    """An imported encoder with a tokenizer, and a corpus for it."""
    run = run_of(find_scheme(SCHEME)(), tmp_path / "run", **SHAPE | {"vocab": 24, "context": 64})
    export(run, tmp_path / "model")
    word_pieces(tmp_path / "model" / "tokenizer.json")
    assert cli.main(["import", str(tmp_path / "model"), "--out", str(tmp_path / "imported")]) == 0
    noise = np.random.default_rng(0)
    texts = [" ".join(noise.choice(WORDS[:12], noise.integers(5, 80))) for _ in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    word_pieces(tmp_path / "tokenizer.json")
    prepare(
        [str(tmp_path / "text.jsonl")], tmp_path / "corpus", tokenizer=str(tmp_path / "tokenizer.json"), validation=0.4
    )
    return tmp_path / "imported", tmp_path / "corpus"


def test_an_imported_encoder_is_looked_at(imported, capsys):
    folder, corpus = imported
    run = nagjax.load(folder)
    ids = run.encode("the cold [MASK] runs")
    assert ids == [2, *(WORDS.index(word) + 5 for word in ("the", "cold")), 4, WORDS.index("runs") + 5, 3]
    want = logits(run, [ids], Where.whole(1, 6))[0]
    np.testing.assert_array_equal(run.logits("the cold [MASK] runs"), want)
    assert cli.main(["info", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "parameters, head" in told and "training FLOPs" not in told
    assert cli.main(["map", str(folder), "--text", "the cold [MASK] runs"]) == 0
    seen = json.loads((folder / "map.json").read_text())
    assert np.array(seen["degrees"]).shape == (6, 6) and np.min(seen["degrees"]) > 0
    effort = ["--data", str(corpus), "--batches", "2", "--skip-batches", "1", "--curve-batches", "1"]
    assert cli.main(["diagnose", str(folder), *effort]) == 0
    record = json.loads((folder / "diagnosis.json").read_text())
    hidden = sum(int(np.sum(batch.tokens == 4)) for batch in text_batches(run, str(corpus), "validation", 2))
    assert record["tokens"] == hidden > 10 and 0 < record["loss"] < 50 and "masked tokens" in record["title"]
    assert record["lens"]["divergence"][-1] == pytest.approx(0, abs=1e-5)
    assert np.all(np.array(record["sublayers"]["norm"])[:, 0] > 0) and all(record["gradients"]["residual"])
    (last,) = [loss for count, loss, _ in record["curve"]["rules"]["late"] if count == 1]
    assert record["skips"]["added_loss"][-1] == pytest.approx(last - record["curve"]["loss"], abs=2e-3)
    pruned, data = folder.parent / "pruned", ["--data", str(corpus)]
    assert cli.main(["prune", str(folder), "--out", str(pruned), "--blocks", "1", *data]) == 0
    assert nagjax.load(pruned).logits("the cold [MASK] runs").shape == want.shape
    capsys.readouterr()
    heal = ["--heal-steps", "1", "--lr", "1e-3", *data]
    for words in (
        ["eval", str(folder), "--data", str(corpus)],
        ["generate", str(folder), "--prompt", "the", "--tokens", "2"],
        ["prune", str(folder), "--out", str(folder.parent / "healed"), "--blocks", "1", *heal],
        ["config", str(folder)],
        ["train", "--start", str(folder), "--data.path", str(corpus), "--out", str(folder.parent / "tuned")],
    ):
        assert cli.main(words) == 2
        assert "causal = False" in capsys.readouterr().err, words


def test_masks_hide_some_tokens_inside_documents(imported):
    run = nagjax.load(imported[0])
    tokens = np.random.default_rng(0).integers(5, 19, (2, 200))
    segments, positions = (
        np.array([[1] * 120 + [2] * 70 + [0] * 10] * 2),
        np.array([[*range(120), *range(70), *[0] * 10]] * 2),
    )
    tokens[:, 119] = 3
    batch = Batch(*map(jnp.asarray, (tokens, tokens, segments, positions, np.ones((2, 200)))))
    found, again = masked(batch, run.tokenizer), masked(batch, run.tokenizer)
    hidden = np.asarray(found.weights) > 0
    np.testing.assert_array_equal(hidden, np.asarray(found.tokens) == 4)
    np.testing.assert_array_equal(found.tokens, again.tokens)
    inside = (positions > 0) & (tokens != 3)
    assert (
        hidden.sum() == np.ceil(0.15 * inside.sum()) and not hidden[positions == 0].any() and not hidden[:, 119].any()
    )
    assert np.all(np.asarray(found.tokens)[:, [0, 120]] == 2)
    np.testing.assert_array_equal(np.asarray(found.targets)[hidden], tokens[hidden])
    np.testing.assert_array_equal(found.counted, segments > 0)
    assert not np.array_equal(found.tokens, masked(batch, run.tokenizer, 1).tokens)
    with pytest.raises(UserError, match="tokenizer = 'bytes': has no mask"):
        masked(batch, nagjax.data.ByteTokenizer())
