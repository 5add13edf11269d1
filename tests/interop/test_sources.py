"""Faults in a model's files are named, and sound files are read without a second copy. Needs no PyTorch."""

import json

import jax
import numpy as np
import pytest

import nagjax
from nagjax.cli import main
from nagjax.data.stdlib import STDLIB
from nagjax.errors import UserError
from nagjax.generate.evaluate import run_text
from nagjax.interop import load_tensors as place
from nagjax.interop.exporting import export
from nagjax.interop.families import Inexpressible, families, family_of, read_only
from nagjax.interop.head_bias import fold_head_bias
from nagjax.interop.importing import import_model
from nagjax.interop.safetensors import Lazy, read_folder, write_folder
from nagjax.interop.source import read_source
from nagjax.layers.config import RopeConfig
from nagjax.residual import find_scheme
from tests.interop.parity import logits_of
from tests.interop.test_export import run_of
from tests.tolerance import assert_close

WIDE = np.dtype(np.float32)


@pytest.fixture
def model(tmp_path):
    """A little Qwen3-like model's folder."""
    export(run_of(find_scheme("plain")(), tmp_path / "run"), tmp_path / "model")
    return tmp_path / "model"


def rewritten(folder, change):
    """The folder with its tensors changed: `change` takes and returns a dict of arrays."""
    tensors = change({name: np.array(value) for name, value in read_folder(folder).items()})
    lazy = [Lazy(name, value.shape, value.dtype, lambda value=value: value) for name, value in tensors.items()]
    write_folder(folder, lazy)
    return folder


def configured(folder, **changes):
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    return folder


DOWN = "model.layers.1.mlp.down_proj.weight"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda own: {k: v for k, v in own.items() if k != DOWN}, f"{DOWN}'?: missing"),
        (lambda own: own | {"model.layers.7.x": own[DOWN]}, "model.layers.7.x.*no place"),
        (lambda own: own | {DOWN: own[DOWN].T.copy()}, rf"{DOWN}.*shape \(48, 16\); the config.json says \(16, 48\)"),
        (lambda own: own | {DOWN: own[DOWN].astype(np.int8)}, f"{DOWN}.*int8: quantised"),
    ],
    ids=["missing", "extra", "mis_shaped", "quantised"],
)
def test_tensors_that_do_not_fit_are_named(model, change, named):
    with pytest.raises(UserError, match=named):
        read_source(rewritten(model, change))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "t5"}, "model_type = 't5'.*known: bert, gemma, gemma2, gemma3, gemma3_text, gpt2"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'.*yarn"),
        ({"num_hidden_layers": ...}, "num_hidden_layers"),
        ({"num_hidden_layers": "two"}, "config.json"),
        (
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"]},
            "layer_types.*must be 3",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"is_causal": False}, "is_causal = False: cannot be imported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor = None: is missing"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization = .*quantised weights"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": YARN},
            "rope_scaling = .*rope_parameters says otherwise",
        ),
    ],
    ids=[
        "family",
        "activation",
        "rope",
        "missing",
        "type",
        "windows",
        "quantised",
        "both_ways",
        "linear_rope",
        "mlx",
        "two_ropes",
    ],
)
def test_settings_that_cannot_be_imported_are_named(model, changes, named):
    with pytest.raises(UserError, match=named):
        read_source(configured(model, **changes))


def test_two_words_for_one_rope_are_one(model):
    both = configured(model, rope_scaling=YARN, rope_parameters=YARN | {"rope_theta": 1e4})
    assert read_source(both).config.model.block.rope.scaling == "yarn"


def test_a_head_beside_a_tied_one_must_be_the_embedding(tmp_path):
    """transformers takes the head of the files then, whatever config.json says."""
    export(run_of(find_scheme("plain")(), tmp_path / "run", tied=True), tmp_path / "model")
    name, table = "lm_head.weight", "model.embed_tokens.weight"
    read_source(rewritten(tmp_path / "model", lambda own: own | {name: own[table]}))
    for other in (lambda x: x + 1e-3, lambda x: x[:-1]):
        rewritten(tmp_path / "model", lambda own, other=other: own | {name: other(own[table])})
        with pytest.raises(UserError, match=f"weights = '{name}': is not the embedding.*tie_word_embeddings"):
            read_source(tmp_path / "model")


def test_a_tokenizer_s_special_tokens_decide(model):
    """Gemma has </s> for texts in HTML, and <eos> to end them; Gemma 3 one more, for images, than rows for it."""
    words = ["<pad>", "<eos>", *"abcdefgh", "</s>"]
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []},
    }  # fmt: skip
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]

    def tokenized(last, special):
        added = [(0, "<pad>", True), (1, "<eos>", True), (10, "</s>", False), (last, "<image>", special)]
        kinds = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
        tokens = [{"id": i, "content": text, "special": own} | kinds for i, text, own in added]
        spec["model"]["vocab"] = {word: i for i, word in enumerate(words)} | {f"w{i}": i for i in range(11, last)}
        (model / "tokenizer.json").write_text(json.dumps(spec | {"added_tokens": tokens}))
        return configured(model, nagjax=...)

    run = read_source(tokenized(vocab, True))
    assert run.tokenizer.end_of_text == 1 and run.tokenizer.vocab_size == vocab + 1
    assert max(run.tokenizer.encode("abc<image></s>"), default=0) < vocab
    for last, special in ((vocab, False), (vocab + 1, True)):
        with pytest.raises(UserError, match=f"has {vocab + 1} tokens, the model {vocab}"):
            read_source(tokenized(last, special))


def test_reading_touches_one_parameter_at_a_time_and_lands_on_the_mesh(model, monkeypatch):
    """Split over eight devices, the largest array the host makes is an eighth of the largest stacked parameter."""
    made = []
    original = np.empty
    monkeypatch.setattr(place.np, "empty", lambda *a, **k: made.append(original(*a, **k)) or made[-1])
    run = read_source(model, devices=jax.devices())
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(run.params["blocks"]))
    assert made and max(array.nbytes for array in made) == largest // 8
    assert len(run.params["blocks"]["mlp"]["branch"]["up"].sharding.device_set) == 8
    alone = read_source(model)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.params), jax.device_get(alone.params))


def test_an_imported_run_is_opened_by_the_commands(model, tmp_path, capsys):
    run = tmp_path / "imported"
    assert main(["import", str(model), "--out", str(run), "--context", "12", "--dtype", "float32"]) == 0
    assert "plain pre-norm, 3 blocks x 16" in capsys.readouterr().out
    assert {"config.json", "origin.json", "tokenizer_config.json"} <= {p.name for p in run.iterdir()}
    opened = nagjax.load(run)
    assert opened.tokenizer.name == "bytes"  # whose tokenizer.json the model had: its corpora are the run's
    tokens = np.random.default_rng(0).integers(0, 257, (2, 12))
    assert_close(logits_of(opened, tokens), logits_of(nagjax.load(model), tokens), terms=64, chain=24)
    assert opened.config.model.context == 12 and opened.step == 0 and "3 blocks x 16" in repr(opened)

    assert main(["eval", str(run), "--batches", "2", "--as-json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["tokens"] == 24 and scores["loss"] > 3.0
    assert main(["generate", str(run), "--prompt", "de", "--tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("de")
    assert main(["info", str(run)]) == 0
    assert main(["export", str(run), "--out", str(tmp_path / "back")]) == 0
    old, new = read_folder(model), read_folder(tmp_path / "back")
    assert all(np.array_equal(old[name], new[name]) for name in old) and old.keys() == new.keys()
    capsys.readouterr()
    assert main(["import", str(model), "--out", str(run)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_more_devices_than_there_are_are_refused(model, tmp_path, capsys):
    assert main(["import", str(model), "--out", str(tmp_path / "run"), "--devices", "999"]) == 2
    assert f"devices = 999: this machine has {len(jax.local_devices())}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_tokenizer_reads_ids_only(model, tmp_path):
    (model / "tokenizer.json").unlink()
    run = import_model(model, tmp_path / "imported")
    opened = nagjax.load(tmp_path / "imported")
    assert opened.tokenizer.vocab_size == 257 and run.tokenizer.end_of_text == opened.tokenizer.end_of_text
    for read in (lambda: opened.tokenizer.encode("a"), lambda: run_text(opened, STDLIB)):
        with pytest.raises(UserError, match="without a tokenizer.json: put one beside its files, and if it was import"):
            read()


def test_an_import_does_not_advise_to_generate_without_a_tokenizer(model, tmp_path, capsys):
    (model / "tokenizer.json").unlink()
    assert main(["import", str(model), "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert "nagjax info" in said.out and "nagjax generate" not in said.out and "token ids only" in said.out


def test_families_write_what_they_read():
    from nagjax.interop.families.llama import FAMILY

    assert FAMILY in families() and len({kind for family in families() for kind in family.model_types}) >= 7
    values = dict(model_type="llama", num_hidden_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=9)
    values |= dict(intermediate_size=12, rope_theta=5e5, attention_bias=True, tie_word_embeddings=True, head_dim=6)
    model, scheme = FAMILY.read(values)
    assert FAMILY.read(FAMILY.write(model, scheme)) == (model, scheme)


NEEDED = dict(num_hidden_layers=3, hidden_size=16, num_attention_heads=2, intermediate_size=24, vocab_size=9)
NEEDED |= dict(n_layer=3, n_embd=16, n_head=2, n_positions=32, ffn_dim=24, rotary_dim=4, num_key_value_heads=2)
NEEDED |= dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
NEEDED |= dict(no_rope_layers=[1, 0, 1])
KINDS = sorted({kind for family in families() for kind in family.model_types} - {"gemma3"})


def read_kind(kind):
    return family_of({"model_type": kind}).read(NEEDED | {"model_type": kind})[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_written(kind):
    """By the family itself, or by another that can say the same: what it writes is read as the same model."""
    family = family_of({"model_type": kind})
    values = NEEDED | {"model_type": kind}
    model, scheme = family.read(values)
    writers = [family] if family.write is not read_only else families()
    found = []
    for writer in writers:
        try:
            found.append(writer.write(model, scheme))
        except Inexpressible:
            assert family.write is read_only
    for written in found[:1]:
        assert written["model_type"] == kind or family.write is read_only
        assert family_of(written).read(json.loads(json.dumps(written))) == (model, scheme)
    assert found
    paths = [part for tensor in family.tensors(model, values) for part in tensor.parts]
    assert len(paths) == len({*paths})


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before = False"),
        ("opt", {"word_embed_proj_dim": 8}, "word_embed_proj_dim = 8.*known: None, 16"),
        ("bert", {"is_decoder": True}, "is_decoder = True"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm = True"),
        ("granite", {"logits_scaling": 0}, "logits_scaling = 0"),
        ("gptj", {"rotary_dim": 64}, "rotary_dim = 64.*8 features"),
        ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ("phi", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ("phi3", {"rope_scaling": {"type": "longrope"}, "max_position_embeddings": 9999}, "longrope'.*--context 4096"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        ("gemma2", {"layer_types": ["linear_attention"] * 3}, "layer_types = .'linear_attention'"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters = .*must have sliding_attention"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 1, 0],
                     "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers = .1, 0.: must have one entry for each"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers = .1."),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts = None: is missing"),
        ("mixtral", {"num_experts_per_tok": 1}, "config.json: num_experts_per_tok = 1: cannot be imported"),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok = 1"),
        ("llama", {"rms_norm_eps": None}, "config.json: rms_norm_eps = None: give a number"),
        ("llama", {"rope_theta": None}, "config.json: rope_theta = None: give a number"),
        ("gpt2", {"layer_norm_epsilon": "small"}, "config.json: layer_norm_epsilon = 'small': give a number"),
        ("llama", {"rope_scaling": "linear"}, "config.json: rope_scaling = 'linear': give an object"),
        ("llamo", {}, "config.json: model_type = 'llamo': is not a family nagjax reads"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate = False"),
    ],
)  # fmt: skip
def test_what_a_family_could_also_be_is_refused_by_name(kind, changes, named):
    values = NEEDED | {"model_type": kind} | changes
    with pytest.raises(UserError, match=named):
        family_of(values).read(values)


def test_yarn_may_have_no_frequencies_in_between():
    given = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2, "beta_slow": 2}
    values = NEEDED | {"model_type": "llama", "rope_scaling": given, "max_position_embeddings": 64}
    rope = family_of(values).read(values)[0].block.rope
    assert (rope.scaling, rope.low, rope.high) == ("yarn", 2.0, 2.0)
    with pytest.raises(UserError, match="low = 2.0"):
        RopeConfig("llama3", 4.0, 2.0, 2.0)


def test_rotary_parameters_of_phi3_that_name_no_type_are_the_usual_ones():
    named, unnamed = (
        NEEDED | {"model_type": "phi3", "rope_parameters": {"rope_theta": 5e4} | more}
        for more in ({"rope_type": "default"}, {})
    )
    assert family_of(unnamed).read(unnamed) == family_of(named).read(named)


def test_heads_without_a_width_of_their_own():
    """Qwen3-MoE's share the model's width, where Qwen3's have 128 features."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    for kind, width in (("qwen3", 128), ("qwen3_moe", NEEDED["hidden_size"] // NEEDED["num_attention_heads"])):
        model, _ = family_of({"model_type": kind}).read(NEEDED | experts | {"model_type": kind})
        assert model.head_width == width


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gemma3_text"])
@pytest.mark.parametrize("scalar", [0, -4, None, "x", True])
def test_a_scale_of_queries_that_is_none_is_refused(tmp_path, kind, scalar):
    own = NEEDED | {"query_pre_attn_scalar": scalar}
    values = {"model_type": kind} | ({"text_config": own} if kind == "gemma3" else own)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="config.json: query_pre_attn_scalar = .*give a number above 0"):
        read_source(tmp_path)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"gpt2", "gptj"}))  # whose depth has another name
@pytest.mark.parametrize("depth", ["two", 0, 2.5, 10**12])
def test_a_depth_is_checked_before_lists_of_it_are_made(tmp_path, kind, depth):
    (tmp_path / "config.json").write_text(json.dumps(NEEDED | {"model_type": kind, "num_hidden_layers": depth}))
    with pytest.raises(UserError, match="config.json: num_hidden_layers|read as depth"):
        read_source(tmp_path)


@pytest.mark.parametrize("kind", [k for k in KINDS if read_kind(k).positions == "learned"])
def test_a_shorter_context_is_refused_where_positions_are_learned(tmp_path, kind):
    """Before any weights are looked for: there are none here."""
    (tmp_path / "config.json").write_text(json.dumps(NEEDED | {"model_type": kind, "max_position_embeddings": 32}))
    with pytest.raises(UserError, match="context = 8: learned positions are 3[02]: leave it out"):
        read_source(tmp_path, context=8)
    with pytest.raises(UserError, match="has no model.safetensors"):
        read_source(tmp_path, context=30 if "roberta" in kind else 32)


def test_gpt_j_turns_as_many_features_as_its_config_says():
    """By a share of a head, which is no binary fraction for most widths of a head."""
    family = family_of({"model_type": "gptj"})
    for head in range(2, 161):
        for rotated in range(2, head + 1, 2):
            values = NEEDED | {"model_type": "gptj", "n_head": 2, "n_embd": 2 * head, "rotary_dim": rotated}
            assert family.read(values)[0].rotated_width == rotated, (head, rotated)


def test_the_bias_of_a_head_goes_into_its_table_and_the_norm():
    noise = np.random.default_rng(0)
    draw = lambda *shape: noise.standard_normal(shape).astype(np.float32)  # noqa: E731
    files = {
        "head.weight": draw(11, 8),
        "head.bias": draw(11),
        "norm.weight": 1.0 + 0.3 * draw(8),
        "norm.bias": draw(8),
    }
    n = draw(5, 8)
    n = (n - n.mean(-1, keepdims=True)) / n.std(-1, keepdims=True)

    def logits(own):
        read = {name: np.asarray(value, float) for name, value in own.items()}
        return (read["norm.weight"] * n + read["norm.bias"]) @ read["head.weight"].T + read.get("head.bias", 0.0)

    for sign in (1.0, -1.0):
        own = files | {"norm.bias": sign * files["norm.bias"]}
        folded = fold_head_bias(own, "head", "norm")
        assert set(folded) == set(own) - {"head.bias"}
        np.testing.assert_allclose(logits(folded), logits(own), atol=1e-5)
    files["norm.weight"][3] = 0.0
    with pytest.raises(UserError, match="norm.weight.*gains of 0"):
        fold_head_bias(files, "head", "norm")
    assert set(fold_head_bias(files | {"head.bias": np.zeros(11)}, "head", "norm")) == set(files) - {"head.bias"}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused(model, value):
    def spoil(own):
        own[DOWN].flat[-1] = value
        return own

    rewritten(model, spoil)
    with pytest.raises(UserError, match="1 of its .* weights are NaN or infinite"):
        read_source(model)
