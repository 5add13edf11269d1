"""What is advised when a run does not fit, and in which order."""

import pytest

from nagjax.plan.advice import advise

GIB = 2**30


def flags(result):
    return [text.split(":")[0] for text in advise(result)]


def test_what_saves_most_comes_first(result):
    found = flags(result)
    assert found[0] == "--remat block" and "--remat dots" in found
    assert "--mesh.data 1 --mesh.fsdp 64" in found and "--accumulate 2" in found and "--batch 128" in found


def test_figures_are_those_of_the_plan(result):
    text = "\n".join(advise(result))
    assert "falls from 40.00 GiB to 2.00 GiB" in text and "fall from 12.00 GiB to 3.00 GiB" in text


def test_no_policy_is_advised_that_is_in_force(result):
    result["memory"]["saved"] = result["saved_by_remat"]["block"]
    result["config"]["model"]["remat"] = "block"
    assert not any(flag.startswith("--remat") for flag in flags(result))


def test_one_sequence_per_device_cannot_be_split_over_time(result):
    result["config"]["train"]["batch"] = 64
    found = flags(result)
    assert not any(flag.startswith(("--accumulate", "--batch")) for flag in found)
    assert "--mesh.tensor 2 --mesh.fsdp 8 --batch 32" in found


def test_a_long_sequence_can_be_split(result):
    result["config"]["train"]["batch"] = 64
    assert not any("--mesh.sequence" in flag for flag in flags(result)), "2048 tokens are not long"
    result["config"]["model"]["context"] = 8192
    assert "--mesh.sequence 2 --mesh.fsdp 8 --batch 32" in flags(result)


@pytest.mark.parametrize(
    "model",
    [
        {"mod": {"attention_rate": [0.5]}},
        {"mod": {"mlp_rate": [0.5]}},
        {"attention": "tokamax"},
        {"moe": {"experts": 8, "dispatch": "capacity"}},
    ],
    ids=("attention skips", "MLPs skip", "whole sequences", "experts of limited capacity"),
)
def test_nothing_is_advised_that_training_refuses(result, model):
    result["config"]["train"]["batch"] = 64
    result["config"]["model"] |= {"context": 8192, **model}
    assert not any("--mesh.sequence" in flag for flag in flags(result))


def test_accumulation_keeps_whole_sequences(result):
    result["config"]["train"] = {"batch": 64 * 9, "accumulate": 3}
    assert "--accumulate 9" in flags(result)


def test_a_state_larger_than_the_machine_needs_more_chips(result):
    result["mesh"] = {"data": 1, "fsdp": 64, "tensor": 1}
    result["memory"] |= {"parameters": 10 * GIB, "optimizer": 20 * GIB}
    assert any("more chips" in text for text in advise(result))


def test_there_is_always_something_to_say(result):
    result["mesh"] = {"data": 1, "fsdp": 1, "tensor": 8}
    result["config"]["train"]["batch"] = 1
    result["saved_by_remat"] = {}
    assert advise(result)
