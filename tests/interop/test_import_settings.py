"""Fields of a config.json that one family heeds and another does not: nagjax reads them as transformers does."""

import json
import shutil

import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.interop.source import read_source
from tests.interop.parity import TOLERANCE, logits_of
from tests.interop.reference_cases import FULL, SLIDING
from tests.interop.test_sources import configured

LIKE_LLAMA = "llama mistral qwen2 qwen3 mixtral qwen3_moe starcoder2 granite smollm3 olmo olmo2 gemma gemma2".split()
IN_PART = ["gpt_neox", "phi", "phi3", "stablelm"]
ASKED = dict(use_sliding_window=True, sliding_window=5)
WINDOWS = {
    "denied": dict(use_sliding_window=False, sliding_window=5),
    "asked_for": ASKED,
    "from_a_block_on": ASKED | dict(max_window_layers=2),
    "not_from_a_block_on": dict(sliding_window=5, max_window_layers=2),
    "by_block": ASKED | dict(layer_types=[FULL, SLIDING, FULL]),
}


def copied(reference, case, to):
    return shutil.copytree(reference.folder / case, to / case)


WITHOUT = "llama granite olmo olmo2 gemma gpt_neox phi stablelm".split()  # read none of these fields
OF_WINDOWS = [(case, name) for case in sorted({*LIKE_LLAMA, *IN_PART} - {"smollm3", *WITHOUT}) for name in WINDOWS]


@pytest.mark.parametrize(
    "case, windows", OF_WINDOWS + [(case, name) for case in WITHOUT for name in ("from_a_block_on", "by_block")]
)
def test_windows_are_those_of_transformers(reference, tmp_path, case, windows):
    folder, tokens = configured(copied(reference, case, tmp_path), **WINDOWS[windows]), reference.tokens(case)
    want = reference.load(folder, tokens)
    assert np.abs(logits_of(read_source(folder), tokens) - want).max() < TOLERANCE


def shared(folder, share):
    """The config.json with a share of each head that rotary turns, in the fields of old and new files."""
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    return configured(folder, rope_parameters=rope | dict(partial_rotary_factor=share), partial_rotary_factor=share)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("case", IN_PART)
def test_rotary_on_a_part_of_each_head_is_that_of_transformers(reference, tmp_path, case, share):
    folder, tokens = shared(copied(reference, case, tmp_path), share), reference.tokens(case)
    want = reference.load(folder, tokens)
    assert np.abs(logits_of(read_source(folder), tokens) - want).max() < TOLERANCE


@pytest.mark.parametrize("case", LIKE_LLAMA)
def test_rotary_on_a_part_of_each_head_is_refused_where_transformers_does_not_know_it(reference, tmp_path, case):
    folder, tokens = copied(reference, case, tmp_path), reference.tokens(case)
    assert np.abs(logits_of(read_source(shared(folder, 1.0)), tokens) - reference.logits(case)).max() < TOLERANCE
    with pytest.raises(UserError, match="config.json: partial_rotary_factor = 0.5"):
        read_source(shared(folder, 0.5))
