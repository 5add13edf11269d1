"""The adapter of a bundle: its logits in every dtype, and every setting of a model's config in it, or refused."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import nagjax
from nagjax.errors import UserError
from nagjax.interop.adapter import adapted_schemes
from nagjax.interop.exporting import export, kept_wide
from nagjax.interop.express import unadapted
from nagjax.interop.load_tensors import flat
from nagjax.interop.safetensors import read_folder
from nagjax.layers.config import BlockConfig, LoRAConfig, MoEConfig, OtherBlocks, RopeConfig
from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from tests import tiny
from tests.interop.parity import TOLERANCE, logits_of
from tests.interop.test_export import ADAPTED, SIZE, TOKENS, run_of
from tests.tolerance import assert_close

ROUNDINGS = 6 * 8  # of six sublayers, each from the stream to its update and back


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ADAPTED)
def test_every_scheme_computes_in_half_of_the_bits(reference, tmp_path, case, dtype):
    name, options = ADAPTED[case]
    run = run_of(find_scheme(name)(**options), tmp_path, tied=case == "nag_tied")
    export(run, tmp_path / "out", format="bundle")
    want = reference.load(tmp_path / "out", TOKENS)
    got = reference.load(tmp_path / "out", TOKENS, dtype)
    assert_close(got, want, terms=1, chain=ROUNDINGS, dtype=jnp.dtype(dtype))
    assert not np.array_equal(got, want)


def test_a_bundle_computes_in_its_own_dtype_unless_told_otherwise(reference, tmp_path):
    run = run_of(find_scheme("nag")(), tmp_path)
    export(run, tmp_path / "out", format="bundle", dtype="bfloat16")
    got = reference.load(tmp_path / "out", TOKENS, "auto")
    np.testing.assert_array_equal(got, reference.load(tmp_path / "out", TOKENS, "bfloat16"))


@pytest.mark.parametrize("case", ADAPTED)
def test_gates_stay_float32_in_the_file_and_when_they_are_loaded(reference, tmp_path, case):
    name, options = ADAPTED[case]
    run = run_of(find_scheme(name)(**options), tmp_path)
    export(run, tmp_path / "out", format="bundle", dtype="bfloat16")
    wide = kept_wide(run)
    assert {path for path, value in read_folder(tmp_path / "out").items() if value.dtype == np.float32} == set(wide)
    for dtype in ("auto", "bfloat16", "float16"):
        assert set(reference.answers(tmp_path / "out", TOKENS, dtype)["wide"]) == set(wide), dtype
    if case == "nag":
        assert {"ends.decode", "ends.encode", "blocks.mlp.gate.alpha", "blocks.mlp.gate.beta"} <= set(wide)
    sizes = {path: value.size for path, value in flat(run.params).items()}
    assert sum(sizes[path] for path in wide) < 0.05 * sum(sizes.values())


def factor(got, want) -> float:
    """By which all logits are off, as least squares has it."""
    return float(np.vdot(got, want) / np.vdot(want, want))


def test_the_head_s_gain_is_not_rounded(reference, tmp_path):
    """A bfloat16 for 6.0150 is 6.0000: logits that are all too small by 1.5%."""
    run = run_of(find_scheme("nag")(), tmp_path)
    run.params["ends"]["decode"] = jnp.float32(6.015)
    export(run, tmp_path / "wide", format="bundle")
    export(run, tmp_path / "narrow", format="bundle", dtype="bfloat16")
    want = logits_of(run, TOKENS)
    again = logits_of(nagjax.load(tmp_path / "narrow"), TOKENS)
    assert factor(again, want) == pytest.approx(1, abs=0.004)  # a bfloat16's own precision
    for folder, dtype in (("narrow", "auto"), ("wide", "bfloat16"), ("wide", "float16")):
        got = reference.load(tmp_path / folder, TOKENS, dtype)
        assert factor(got, want) == pytest.approx(1, abs=0.004), (folder, dtype)


def test_the_loss_is_that_of_transformers(reference, tmp_path):
    """Its Trainer divides the sum over a step's micro-batches by the step's number of targets."""
    run = run_of(find_scheme("plain")(), tmp_path)
    export(run, tmp_path / "out", format="bundle")
    labels = np.where(np.arange(TOKENS.size).reshape(TOKENS.shape) % 5 == 0, -100, TOKENS)
    logits = logits_of(run, TOKENS).astype(np.float64)[:, :-1]
    targets = labels[:, 1:]
    nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    counted = targets != -100
    answers = functools.partial(reference.answers, tmp_path / "out", TOKENS, labels=labels)
    assert answers()["loss"] == pytest.approx(nats[counted].mean(), rel=1e-5)
    told = answers(num_items_in_batch=np.array(4 * counted.sum()))["loss"]
    assert told == pytest.approx(nats[counted].sum() / (4 * counted.sum()), rel=1e-5)
    in_a_row = np.tile(np.arange(TOKENS.shape[1]), (len(TOKENS), 1))
    assert answers(position_ids=in_a_row)["loss"] == answers()["loss"]
    with pytest.raises(RuntimeError, match="give each text a row of its own"):
        answers(position_ids=in_a_row % 5)


def test_what_the_adapter_does_not_compute_is_refused(reference, tmp_path):
    run = run_of(find_scheme("plain")(), tmp_path)
    export(run, tmp_path / "out", format="bundle")
    answers = functools.partial(reference.answers, tmp_path / "out")
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(RuntimeError, match=f"{name}: .*nagjax.load"):
            answers(TOKENS, **{name: np.array(True)})
        answers(TOKENS, **{name: np.array(False)})
    square = np.ones((len(TOKENS), 1, TOKENS.shape[1], TOKENS.shape[1]))
    with pytest.raises(RuntimeError, match=r"attention_mask is \[\d+, 1, .*1 for text and 0 for padding"):
        answers(TOKENS, attention_mask=square)
    with pytest.raises(RuntimeError, match="input_ids: give the tokens"):
        answers(None, inputs_embeds=np.zeros((1, 2, 3)))


def test_a_tuple_is_returned_where_one_is_asked_for(reference, tmp_path):
    export(run_of(find_scheme("plain")(), tmp_path), tmp_path / "out", format="bundle")
    want = reference.answers(tmp_path / "out", TOKENS, labels=TOKENS)
    got = reference.answers(tmp_path / "out", TOKENS, labels=TOKENS, return_dict=np.array(False))
    assert set(got) == {"logits", "loss", "wide", "tuple"} == {*want, "tuple"}
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


LLAMA3 = dict(factor=4.0, low=0.5, high=3.0, original=20)
OWN_ROPE = RopeConfig("llama3", 2.0, 0.5, 3.0, 7, 1.1, (2.0,))
EXPERTS = MoEConfig(4, 1, 1, 24, "sigmoid", "score", "capacity", 2.0, 0.1, 0.1, 0.1, 1)
# Models that differ from the tiny one in some of their fields; all of them together in every field.
CHANGES = {
    "sizes": dict(depth=2, width=24, heads=3, kv_heads=3, hidden=40, context=18, vocab=258),
    "head_width": dict(block=BlockConfig(head_width=6)),
    "biases": dict(block=BlockConfig(biases=("qkv", "out", "mlp"))),
    "qk_gain": dict(block=BlockConfig(qk_gain="head", qk_epsilon=0.1)),
    "qk_gain_row": dict(block=BlockConfig(qk_gain="row", qk_epsilon=0.1)),
    "rotated": dict(block=BlockConfig(rotated=0.5)),
    "window": dict(block=BlockConfig(window=3)),
    "softcap": dict(block=BlockConfig(softcap=0.5)),
    "cca": dict(block=BlockConfig(cca=True)),
    "others": dict(block=BlockConfig(others=OtherBlocks((1,), 3, "own", 50.0, OWN_ROPE))),
    "attention": dict(block=BlockConfig(rope=RopeConfig(attention=1.3))),
    "linear": dict(block=BlockConfig(rope=RopeConfig("linear", 2.0))),
    "linear_attention": dict(block=BlockConfig(rope=RopeConfig("linear", 2.0, attention=1.3))),
    "llama3": dict(block=BlockConfig(rope=RopeConfig("llama3", **LLAMA3))),
    "llama3_attention": dict(block=BlockConfig(rotated=0.5, rope=RopeConfig("llama3", **LLAMA3, attention=1.3))),
    "yarn": dict(block=BlockConfig(rope=RopeConfig("yarn", **LLAMA3, attention=1.3))),
    "longrope": dict(block=BlockConfig(rope=RopeConfig("longrope", divisors=(1.0, 2.0, 3.0, 4.0)))),
    "learned": dict(positions="learned"),
    "rope_base": dict(rope_base=50.0),
    "qk_norm": dict(qk_norm=False),
    "tied": dict(tied=True),
    "geglu": dict(mlp="geglu"),
    "gelu": dict(mlp="gelu"),
    "gelu_exact": dict(mlp="gelu_exact"),
    "relu": dict(mlp="relu"),
    "softcap_of_logits": dict(logit_softcap=1.0),
    "bidirectional": dict(causal=False),
    "token_types": dict(token_types=2),
    "head_epsilon": dict(head_epsilon=0.1),
    "pruned": dict(kept=(0, 2, 5), depth_before=7),
    "experts": dict(moe=EXPERTS),
    "routed": dict(mod=ModConfig(rate=(0.5,))),
}
# They decide how a model is trained and by which program it is computed, but not what it computes; adapters of LoRA
# are merged when a run is opened; Mixture-of-Depths, of which a bundle is for `nagjax.load`, is refused as a whole.
ELSEWHERE = "parametrization base_width init_std dtype residual_dtype remat attention kernels lora mod"
REFUSED = "softcap cca others yarn longrope softcap_of_logits bidirectional token_types head_epsilon experts"


def leaves(config, prefix="") -> dict:
    """Every field of a config and of the configs in it."""
    found = {}
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), f"{prefix}{field.name}"
        nested = dataclasses.is_dataclass(value) and not isinstance(value, ModConfig | LoRAConfig)
        found |= leaves(value, f"{path}.") if nested else {path: value}
    return found


def model_of(changes: dict) -> ModelConfig:
    return tiny.model_config(**SIZE | changes)


def test_every_field_of_a_config_is_changed_below():
    base = leaves(model_of({}))
    seen = {path for own in CHANGES.values() for path, value in leaves(model_of(own)).items() if value != base[path]}
    assert set(base) - set(ELSEWHERE.split()) <= seen
    assert {case for case, own in CHANGES.items() if unadapted(model_of(own))} == set(REFUSED.split())


@pytest.mark.parametrize("case", sorted(set(CHANGES) - {"routed"}))
def test_a_setting_has_its_effect_in_the_adapter_or_is_refused(reference, tmp_path, case):
    """LayerNorm Scaling's factors tell the blocks of a pruned model apart."""
    run = run_of(find_scheme("lns")(), tmp_path, **CHANGES[case])
    if case in REFUSED.split():
        with pytest.raises(UserError, match="adapter that a bundle carries has no place for it"):
            export(run, tmp_path / "out", format="bundle")
        return
    export(run, tmp_path / "out", format="bundle")
    want = logits_of(run, TOKENS)
    assert np.abs(reference.load(tmp_path / "out", TOKENS) - want).max() < TOLERANCE
    before = logits_of(run_of(find_scheme("lns")(), tmp_path), TOKENS)
    assert want.shape != before.shape or np.abs(want - before).max() > 10 * TOLERANCE
    rounded = reference.load(tmp_path / "out", TOKENS, "bfloat16")
    assert_close(rounded, want, terms=1, chain=ROUNDINGS, dtype=jnp.bfloat16)


OPTIONS = {"epsilon": 0.1, "scaled_start": False, "rank": 2, "directions": 3, "alpha_power": 1.0, "ramp": 0.5}


@pytest.mark.parametrize("name", adapted_schemes())
def test_the_options_of_a_scheme_have_their_effect(reference, tmp_path, name):
    options = {field.name: OPTIONS[field.name] for field in dataclasses.fields(find_scheme(name))}
    run = run_of(find_scheme(name)(**options), tmp_path)
    export(run, tmp_path / "out", format="bundle")
    assert np.abs(reference.load(tmp_path / "out", TOKENS) - logits_of(run, TOKENS)).max() < TOLERANCE
