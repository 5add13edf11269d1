"""Scaled rotary in every family's format: what is written is what transformers and nagjax read, or it is refused."""

import dataclasses
import json

import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.interop.exporting import export
from nagjax.interop.families import Inexpressible, family_of
from nagjax.interop.families.common import FULL, LONGEST, SLIDING
from nagjax.layers.config import BlockConfig, RopeConfig
from nagjax.residual import find_scheme
from tests import tiny
from tests.interop.parity import TOLERANCE, logits_of
from tests.interop.test_export import PLAIN, SIZE, TOKENS, kind_of, run_of

SCALINGS = {
    "linear": RopeConfig("linear", 2.0),
    "llama3": RopeConfig("llama3", 4.0, 0.5, 3.0, 20),
    "yarn": RopeConfig("yarn", 4.0, 1.0, 32.0, 8, 1.2),
}

OTHERS = ("linear", "llama3")


def scaled(case: str, rope: RopeConfig) -> dict:
    """The changes of a case of an export, with its rotary scaled, and that of its other blocks as well."""
    changes = PLAIN[case][1]
    block = changes.get("block", BlockConfig())
    others = block.others
    if others.rotary == "own":
        others = dataclasses.replace(others, rope=rope)
    return changes | {"block": dataclasses.replace(block, rope=rope, others=others)}


ROTARY = [case for case, (_, changes) in PLAIN.items() if "positions" not in changes]


@pytest.mark.parametrize(  # yarn has most fields; families read and write them by one function, but Gemma 3
    "case, scaling",
    [(case, "yarn") for case in ROTARY] + [(case, name) for case in ("llama", "gemma3_text") for name in OTHERS],
)
def test_scaled_rotary_is_read_as_it_was_written_or_refused(reference, tmp_path, case, scaling):
    scheme, rope = find_scheme(PLAIN[case][0])(), SCALINGS[scaling]
    run = run_of(scheme, tmp_path, **scaled(case, rope))
    if case == "phi3":  # which has rotary on a part of each head besides, as no other family has
        with pytest.raises(Inexpressible, match=f"block.rope.scaling = '{scaling}': its rotary is scaled by longrope"):
            family_of({"model_type": "phi3"}).write(run.config.model, scheme)
        with pytest.raises(UserError, match="the nearest plain format cannot express it"):
            export(run, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    export(run, tmp_path / "out")
    want = logits_of(run, TOKENS)
    assert np.abs(reference.load(tmp_path / "out", TOKENS) - want).max() < TOLERANCE
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    model, _ = family_of(values).read(values)
    assert model.block.rope == rope and model.block.others == run.config.model.block.others
    assert model.rotated_width == run.config.model.rotated_width


@pytest.mark.parametrize("case", [case for case in ROTARY if PLAIN[case][0] != "lns"])  # which is written as plain
@pytest.mark.parametrize("scaling", ["none", "linear", "llama3", "longrope"])
def test_what_no_format_says_of_rotary_is_refused(case, scaling):
    """A factor on queries and keys without yarn; longrope, whose factors for longer contexts were not read."""
    rope = dataclasses.replace(SCALINGS.get(scaling, RopeConfig()), attention=1.3)
    if scaling == "longrope":
        pairs = tiny.model_config(**SIZE | PLAIN[case][1]).rotated_width // 2
        rope = RopeConfig("longrope", divisors=(2.0,) * pairs)
    model = tiny.model_config(**SIZE | scaled(case, rope))
    with pytest.raises(Inexpressible, match="block.rope"):
        family_of({"model_type": kind_of(case)}).write(model, find_scheme(PLAIN[case][0])())


def test_a_shorter_context_does_not_change_the_original_one_of_gemma_3():
    """Which yarn's turn is relative to where a config.json does not say it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    values = {
        "model_type": "gemma3_text", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 48, "head_dim": 8,
        "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 12,
        "rope_parameters": {FULL: yarn, SLIDING: {"rope_theta": 1e4}},
    }  # fmt: skip
    originals = [family_of(own).read(own)[0].block.others.rope.original for own in (values, values | {LONGEST: 64})]
    assert originals == [12, 64]
