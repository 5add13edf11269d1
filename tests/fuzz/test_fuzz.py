"""The short form of `make fuzz`: some mutations of each kind of file; and that the walk tells what it must tell."""

import random
from collections import Counter

import pytest

from nagjax.errors import UserError
from tests.fuzz.mutations import mutate, mutated_bytes, mutated_json, places
from tests.fuzz.walk import Outcome, once, table, walk
from tests.fuzz.world import Target, build, function

SEED, MUTATIONS = 3, 48


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return build(tmp_path_factory.mktemp("fuzz") / "world", trained=False)


def test_every_damage_is_refused_in_one_line_or_harmless(targets, tmp_path):
    found = walk(targets, range(MUTATIONS), SEED, tmp_path)
    assert [failure for one in found.values() for failure in one.failures] == []
    refused, accepted = sum(one.refused for one in found.values()), sum(one.accepted for one in found.values())
    assert refused + accepted == MUTATIONS and refused >= MUTATIONS // 3
    assert {target for target, _ in found} == {target.name for target in targets}


def test_what_is_not_damaged_is_accepted(targets, tmp_path):
    for target in targets:
        name = target.files()[0]
        for verb in sorted(target.verbs):
            code, problem = once(target, name, verb, random.Random(0), tmp_path, damage=lambda rng, path: "nothing")
            assert (code, problem) == (0, ""), (target.name, verb)


@pytest.mark.parametrize(
    ("ending", "told"),
    [(ValueError("x"), "ValueError: x"), (RecursionError(), "RecursionError"), (SystemExit(3), "SystemExit: 3")],
)
def test_another_ending_is_a_failure(tmp_path, ending, told):
    def read(folder):
        raise ending

    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.json").write_text('{"a": 1}')
    target = Target("made up", tmp_path / "folder", ("*",), {"read": function(read)})
    (outcome,) = walk([target], range(3), 0, tmp_path / "scratch").values()
    assert len(outcome.failures) == 3 and told in outcome.failures[0]


def test_a_refusal_is_no_failure(tmp_path):
    def read(folder):
        raise UserError("file", "a\nb", "x" * 10_000)

    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.json").write_text('{"a": 1}')
    target = Target("made up", tmp_path / "folder", ("*",), {"read": function(read)})
    (outcome,) = walk([target], range(3), 0, tmp_path / "scratch").values()
    assert (outcome.refused, outcome.accepted, outcome.failures) == (3, 0, [])


def test_mutations_reach_every_place_and_follow_the_seed(tmp_path):
    value = {"a": [1, {"b": None}], "c": "d"}
    assert places(value) == [(), ("a",), ("a", 0), ("a", 1), ("a", 1, "b"), ("c",)]
    texts = [mutated_json(random.Random(i), value) for i in range(300)]
    assert texts == [mutated_json(random.Random(i), value) for i in range(300)]
    assert len({*texts}) > 100 and any("NaN" in text for text in texts) and any("[" * 300 in text for text in texts)
    assert sum(mutated_bytes(random.Random(i), b"0123456789") != b"0123456789" for i in range(100)) > 90
    kinds = Counter()
    for i in range(60):
        path = tmp_path / "inner" / f"{i}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"a": 1}')
        kinds[mutate(random.Random(i), path)] += 1
    assert {"json_file", "raw", "replaced"} == {*kinds}


def test_the_table_counts():
    text = table({("run", "a.json"): Outcome(3, 2, ["x"]), ("run", "b"): Outcome(1)})
    assert "| run | a.json | 6 | 3 | 2 | 1 |" in text and "| all | | 7 | 4 | 2 | 1 |" in text
