"""Exported models as transformers loads them, and runs that no Hugging Face format can express."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

import nagjax
from nagjax.data import ByteTokenizer
from nagjax.errors import UserError
from nagjax.interop.adapter import ADAPTER, adapted_schemes
from nagjax.interop.exporting import export, kept_wide
from nagjax.interop.importing import import_model
from nagjax.interop.load_tensors import flat
from nagjax.layers.config import BlockConfig, MoEConfig, OtherBlocks, RopeConfig
from nagjax.mod import ModConfig
from nagjax.residual.registry import find_scheme, schemes
from nagjax.runs.opening import OpenRun, open_run
from tests import tiny
from tests.interop.parity import TOLERANCE, logits_of

BIASED = BlockConfig(biases=("qkv", "out", "mlp"))
CAPPED = BlockConfig(softcap=2.0, window=5, others=OtherBlocks((1,)))
GEMMA3 = BlockConfig(qk_gain="head", window=5, others=OtherBlocks((0, 2), None, "own", 1e5, RopeConfig("linear", 2.0)))
SIZE = dict(vocab=257, context=16)
TOKENS = np.random.default_rng(1).integers(0, 257, (2, 16))


def run_of(scheme, folder, step=3, **model) -> OpenRun:
    """A run whose parameters are all random."""
    blueprint, noise = tiny.blueprint(tiny.run_config(scheme, **SIZE | model)), np.random.default_rng(0)

    def value(parameter):
        scale = {"norm": 0.3, "gate": 0.3, "matrix": 0.3, "embedding": 0.5, "head": 0.5}[parameter.role]
        offset = 1.0 if parameter.role == "norm" else 0.0
        return jax.numpy.asarray(offset + scale * noise.standard_normal(parameter.shape), jax.numpy.float32)

    return OpenRun(folder, blueprint, step, jax.tree.map(value, blueprint.parameters), {}, ByteTokenizer())


PLAIN = {
    "llama": ("plain", dict(qk_norm=False, heads=4, kv_heads=2)),
    "llama_rope": (
        "plain",
        dict(qk_norm=False, tied=True, block=BlockConfig(rope=RopeConfig("llama3", 4.0, original=8), head_width=6)),
    ),
    "qwen3": ("plain", dict()),
    "qwen3_of_lns": ("lns", dict(depth=4)),
    "mistral": ("plain", dict(qk_norm=False, block=BlockConfig(window=5))),
    "qwen2": ("plain", dict(qk_norm=False, block=BlockConfig(biases=("qkv",)))),
    "olmo2": ("reordered", dict(block=BlockConfig(qk_gain="row"))),
    "gpt2": ("layer_norm", dict(positions="learned", mlp="gelu", qk_norm=False, kv_heads=2, tied=True, block=BIASED)),
    "gpt_neox": (
        "parallel",
        dict(qk_norm=False, kv_heads=2, mlp="gelu_exact", block=dataclasses.replace(BIASED, rotated=0.5)),
    ),
    "opt": ("layer_norm", dict(positions="learned", mlp="relu", qk_norm=False, kv_heads=2, block=BIASED)),
    "starcoder2": ("layer_norm", dict(mlp="gelu", qk_norm=False, heads=4, kv_heads=2, block=BlockConfig(window=9))),
    "stablelm": ("layer_norm", dict(qk_norm=False, block=BlockConfig(biases=("qkv",), rotated=0.5))),
    "qwen2_windows": (
        "plain",
        dict(qk_norm=False, depth=4, block=BlockConfig(biases=("qkv",), window=5, others=OtherBlocks((0, 2)))),
    ),
    "llama_yarn": ("plain", dict(qk_norm=False, block=BlockConfig(rope=RopeConfig("yarn", 4.0, 1.0, 32.0, 8, 1.2)))),
    "smollm3": (
        "plain",
        dict(qk_norm=False, depth=4, block=BlockConfig(window=9, others=OtherBlocks((1, 2), rotary="none"))),
    ),
    "gemma": ("plain", dict(qk_norm=False, mlp="geglu", tied=True)),
    "gemma2": ("sandwich", dict(mlp="geglu", qk_norm=False, logit_softcap=3.0, block=CAPPED)),
    "gemma3_text": ("sandwich", dict(mlp="geglu", tied=True, block=GEMMA3)),
    "mixtral": ("plain", dict(qk_norm=False, moe=MoEConfig(4, 2, hidden=24))),
    "qwen3_moe": ("plain", dict(moe=MoEConfig(4, 2, hidden=24, weights="score"))),
    "phi3": ("plain", dict(qk_norm=False, block=BlockConfig(rotated=0.5, window=9))),
    "bert": (
        "post_layer_norm",
        dict(qk_norm=False, kv_heads=2, positions="learned", mlp="gelu_exact", tied=True, block=BIASED)
        | dict(causal=False, token_types=2, head_epsilon=1e-12),
    ),
}


def kind_of(case: str) -> str:
    """The model_type that a case is written as."""
    return re.split("_rope|_of|_yarn|_windows", case)[0]


@pytest.mark.parametrize("case", PLAIN)
def test_transformers_loads_what_was_exported(reference, tmp_path, case):
    name, changes = PLAIN[case]
    run = run_of(find_scheme(name)(), tmp_path, **changes)
    family = export(run, tmp_path / "out")
    assert family == kind_of(case)
    want = logits_of(run, TOKENS)
    assert np.abs(reference.load(tmp_path / "out", TOKENS) - want).max() < TOLERANCE
    again = nagjax.load(tmp_path / "out")
    assert np.abs(logits_of(again, TOKENS) - want).max() < TOLERANCE
    text = "tokens: é\n"
    assert again.tokenizer.encode(text).tolist() == run.tokenizer.encode(text).tolist()


def test_gemma_3_has_no_limit_on_attention_s_logits(reference, tmp_path):
    """transformers reads one and makes nothing of it: written it would be lost, so another family is looked for."""
    block = dataclasses.replace(GEMMA3, softcap=2.0)
    run = run_of(find_scheme("sandwich")(), tmp_path, mlp="geglu", tied=True, block=block)
    with pytest.raises(UserError, match="the nearest plain format cannot express it"):  # Gemma 2: no norms on queries
        export(run, tmp_path / "out")
    name, changes = PLAIN["gemma3_text"]
    export(run_of(find_scheme(name)(), tmp_path / "run", **changes), tmp_path / "plain")
    path = tmp_path / "plain" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attn_logit_softcapping": 2.0}))
    want = reference.load(tmp_path / "plain", TOKENS)
    assert np.abs(logits_of(nagjax.load(tmp_path / "plain"), TOKENS) - want).max() < TOLERANCE


def test_an_imported_model_goes_back_under_the_same_names(reference, tmp_path):
    """Through a run's folder, in shards; the tensors are the same to the bit."""
    from nagjax.interop.safetensors import read_folder

    for case in ("qwen2", "gpt_neox", "starcoder2", "stablelm", "phi4_mini", "smollm3_windows", "qwen3_moe", "bert"):
        source, run, out = reference.folder / case, tmp_path / f"{case}_run", tmp_path / case
        import_model(source, run)
        export(run, out, shard_bytes=20_000)
        assert (out / "model.safetensors.index.json").exists()
        old, new = read_folder(source), read_folder(out)
        head = {"lm_head.weight": "embed_out.weight"} if case == "gpt_neox" else {}
        assert {head.get(name, name) for name in old} == set(new)
        for name, value in old.items():
            np.testing.assert_array_equal(value, new[head.get(name, name)], err_msg=name)
        got = reference.load(out, reference.tokens(case))
        assert np.abs(got - reference.logits(case)).max() < TOLERANCE


@pytest.mark.parametrize(
    ("case", "other"),
    [("gptj", "gpt_neox"), ("granite_tied_biases", "llama"), ("olmo", "stablelm"), ("gemma3_images", "gemma3_text")]
    + [("roberta", "bert"), ("xlm_roberta", "bert")],
)
def test_a_family_that_is_only_read_is_written_as_another(reference, tmp_path, case, other):
    assert export(nagjax.load(reference.folder / case), tmp_path / "out") == other
    got = reference.load(tmp_path / "out", reference.tokens(case))
    assert np.abs(got - reference.logits(case)).max() < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(logit_softcap=3.0), "logit_softcap = 3.0"),
        (dict(block=BlockConfig(others=OtherBlocks((1,)))), "block.others.places"),
        (dict(moe=MoEConfig(4, 2)), "moe.experts = 4"),
        (dict(block=BlockConfig(rope=RopeConfig("yarn"))), "block.rope.scaling = 'yarn'"),
    ],
)
def test_what_the_adapter_has_not_is_refused_before_anything_is_written(tmp_path, changes, named):
    run = run_of(find_scheme("nag")(), tmp_path, **changes)
    with pytest.raises(UserError, match=f"{named}.*adapter that a bundle carries"):
        export(run, tmp_path / "out", format="bundle")
    with pytest.raises(UserError, match="scheme = 'nag'.*nor can a bundle, whose adapter has no"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(moe=MoEConfig(4, 2, score="sigmoid")), "moe.score = 'sigmoid'.*scores are a softmax"),
        (dict(moe=MoEConfig(4, 2, shared=1)), "moe.shared = 1"),
        (dict(moe=MoEConfig(4, 2, skips=1)), "moe.skips = 1"),
        (dict(moe=MoEConfig(4, 2, bias_rate=0.1)), "moe.bias_rate = 0.1"),
        (dict(moe=MoEConfig(4, 2), mlp="geglu"), "mlp = 'geglu'"),
    ],
)
def test_of_experts_what_their_formats_lack_is_named(tmp_path, changes, named):
    with pytest.raises(UserError, match=named):
        export(run_of(find_scheme("plain")(), tmp_path, **changes), tmp_path / "out")


def test_a_calibrated_bundle_becomes_a_dense_run_with_its_point(tmp_path):
    """As the run is that was exported: dense, to be calibrated again, and used at its point."""
    point = {"rate": 0.3, "threshold": 0.1}
    (tmp_path / "calibration.json").write_text(json.dumps(point))
    export(run_of(find_scheme("nag")(), tmp_path), tmp_path / "bundle", format="bundle")
    assert nagjax.load(tmp_path / "bundle").calibrated
    imported = import_model(tmp_path / "bundle", tmp_path / "run")
    for run in (imported, nagjax.load(tmp_path / "run")):
        assert run.calibrated and run.folder == tmp_path / "run" and run.mod["cuts"][0] == np.float32(0.1)
    assert not open_run(tmp_path / "run", calibrated=False).config.model.mod.active


@pytest.mark.parametrize("way", ["by_path", "opened_at_its_point", "opened_densely"])
def test_a_calibrated_run_is_exported_as_the_dense_model_however_it_was_opened(reference, tmp_path, way):
    export(run_of(find_scheme("nag")(), tmp_path), tmp_path / "bundle", format="bundle")
    folder = import_model(tmp_path / "bundle", tmp_path / "run").folder
    (folder / "calibration.json").write_text(json.dumps({"rate": 0.3, "threshold": 0.1}))
    run = {"by_path": str, "opened_at_its_point": open_run}.get(way, lambda path: open_run(path, calibrated=False))(
        folder
    )
    export(run, tmp_path / "out", format="bundle")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["nagjax"]["config"]["model"]["mod"]["rate"] == [0.0]
    dense = open_run(folder, calibrated=False)
    assert np.abs(reference.load(tmp_path / "out", TOKENS) - logits_of(dense, TOKENS)).max() < TOLERANCE
    assert nagjax.load(tmp_path / "out").calibrated


def test_a_run_that_reads_bytes_reads_bytes_when_its_bundle_was_imported(tmp_path):
    export(run_of(find_scheme("nag")(), tmp_path), tmp_path / "bundle", format="bundle")
    imported = import_model(tmp_path / "bundle", tmp_path / "run")
    export(tmp_path / "run", tmp_path / "again", format="bundle")
    for run in (
        nagjax.load(tmp_path / "bundle"),
        imported,
        nagjax.load(tmp_path / "run"),
        nagjax.load(tmp_path / "again"),
    ):
        assert run.tokenizer.name == "bytes" and run.tokenizer.fingerprint == ByteTokenizer.fingerprint
    names = ("tokenizer.json", "tokenizer_config.json")
    assert all((tmp_path / "bundle" / name).read_text() == (tmp_path / "again" / name).read_text() for name in names)


def test_a_tokenizer_s_settings_name_its_class_whatever_a_run_on_conversations_has_kept(tmp_path):
    """Its special tokens alone, which the chat template reads: transformers would guess the class by the model's."""
    run = run_of(find_scheme("plain")(), tmp_path / "run")
    run.folder.mkdir(exist_ok=True)
    (run.folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    export(run, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    end = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    assert settings == end | {"bos_token": "<s>"}
    (run.folder / "origin.json").write_text(
        '{"tokenizer_vocab": 256, "end_of_text": 0}'
    )  # an imported model has the class of its own kind
    export(run, tmp_path / "imported")
    assert json.loads((tmp_path / "imported" / "tokenizer_config.json").read_text()) == {"bos_token": "<s>"}


ADAPTED = {name: (name, {}) for name in adapted_schemes()} | {
    "review_rank_2": ("review", {"rank": 2}),
    "nag_tied": ("nag", {"directions": 3}),
}


@pytest.mark.parametrize("case", ADAPTED)
def test_the_adapter_of_a_bundle_has_the_same_logits(reference, tmp_path, case):
    name, options = ADAPTED[case]
    changes = dict(
        tied=case == "nag_tied", block=BlockConfig(window=9, rotated=0.5) if case == "lns" else BlockConfig()
    )
    run = run_of(find_scheme(name)(**options), tmp_path, **changes)
    assert export(run, tmp_path / "out", format="bundle") == "nagjax"
    want = logits_of(run, TOKENS)
    assert np.abs(reference.load(tmp_path / "out", TOKENS) - want).max() < TOLERANCE
    again = nagjax.load(tmp_path / "out")
    assert again.config == run.config and again.step == run.step and again.tokenizer.name == "bytes"
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)


@pytest.mark.parametrize(
    ("scheme", "changes", "named"),
    [
        ("nag", {}, "scheme = 'nag': no plain format.*--format bundle"),
        ("review", {}, "scheme = 'review'"),
        ("oru", {}, "scheme = 'oru'"),
        ("post_layer_norm", {}, "causal = True: the nearest plain format cannot express it.*nor can a bundle"),
        ("plain", {"mlp": "gelu"}, "mlp = 'gelu'.*gated"),
        ("plain", {"mod": ModConfig(rate=(0.5,))}, "mod.rate = .*--format bundle, which nagjax.load reads;"),
        ("plain", {"mod": ModConfig(mlp_rate=(1.0,))}, r"mod.mlp_rate = \(1.0,\): plain formats run every sublayer"),
        ("plain", {"token_types": 2}, "token_types = 2: the nearest plain format.*nor can a bundle"),
        ("plain", {"head_epsilon": 1e-5}, "head_epsilon = 1e-05: the nearest plain format.*nor can a bundle"),
        ("plain", {"block": BlockConfig(cca=True)}, "block.cca = True: plain formats.*nor can a bundle"),
        (
            "layer_norm",
            {"qk_norm": False, "kv_heads": 2, "mlp": "gelu", "block": BlockConfig(biases=("qkv",))},
            "block.biases",
        ),
    ],
    ids=["nag", "review", "built_on_plain", "post_norm", "gelu", "mod", "mlp", "types", "head", "cca", "no_biases"],
)
def test_what_plain_formats_cannot_say_is_refused(tmp_path, scheme, changes, named):
    run = run_of(find_scheme(scheme)(), tmp_path, **changes)
    with pytest.raises(UserError, match=named):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_adapter_s_schemes_are_read_without_torch():
    names = adapted_schemes()
    assert {"plain", "nag"} <= set(names) <= set(schemes())
    text = ADAPTER.read_text(encoding="utf-8").partition("\nSCHEMES = {\n")[2].partition("\n}\n")[0]
    assert [line.split('"')[1] for line in text.splitlines()] == list(names)


@pytest.mark.parametrize("format", ["bundle", "plain"])
@pytest.mark.parametrize("mod", [ModConfig(), ModConfig(rate=(0.5,))], ids=["dense", "routed"])
def test_a_scheme_that_is_not_in_the_adapter_is_refused_before_anything_is_written(tmp_path, format, mod):
    assert "ngpt" not in adapted_schemes()
    run = run_of(find_scheme("ngpt")(), tmp_path, mod=mod)
    field = "mod.rate = .*" if format == "plain" and mod.active else "scheme = 'ngpt'"
    with pytest.raises(
        UserError, match=f"{field}.*adapter.* has {', '.join(adapted_schemes())}; nagjax.load"
    ) as caught:
        export(run, tmp_path / "out", format=format)
    assert "--format bundle" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_bundle_in_bfloat16_is_half_as_large_and_tells_its_dtype(tmp_path):
    run = run_of(find_scheme("nag")(), tmp_path)
    export(run, tmp_path / "wide", format="bundle")
    export(run, tmp_path / "narrow", format="bundle", dtype="bfloat16")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("narrow", "wide")]
    assert sizes[0] < 0.6 * sizes[1]
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["dtype"] == "bfloat16"
    again, wide = flat(nagjax.load(tmp_path / "narrow").params), kept_wide(run)
    for path, value in flat(run.params).items():
        rounded = value if path in wide else np.asarray(value, jax.numpy.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(again[path], rounded, err_msg=path)


def test_a_folder_in_use_is_left_alone(tmp_path):
    run = run_of(find_scheme("plain")(), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="out = .*not empty"):
        export(run, tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"


@pytest.mark.parametrize("mod", [ModConfig(rate=(0.5,)), ModConfig(attention_rate=(0.5,))], ids=["all", "attention"])
def test_a_routed_run_travels_in_a_bundle_with_its_thresholds(reference, tmp_path, mod):
    run = run_of(find_scheme("nag")(directions=3), tmp_path, mod=mod)
    run.mod["cuts"] = jax.numpy.arange(run.config.model.sublayers, dtype=jax.numpy.float32)
    export(run, tmp_path / "out", format="bundle", dtype="bfloat16")
    import_model(tmp_path / "out", tmp_path / "again")
    for again in (nagjax.load(tmp_path / "out"), nagjax.load(tmp_path / "again")):
        assert again.config == run.config and again.step == run.step
        np.testing.assert_array_equal(again.mod["cuts"], run.mod["cuts"])
    with pytest.raises(RuntimeError, match="no Mixture-of-Depths: open this bundle with nagjax.load"):
        reference.load(tmp_path / "out", TOKENS)
