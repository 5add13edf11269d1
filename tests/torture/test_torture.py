"""The short form of `make torture`: a few faults of every family, in one run after the other of one configuration."""

import json
import subprocess
import sys

import pytest

from tests.torture.faults import DAMAGE, KINDS, draw
from tests.torture.report import page

SEED, FAULTS = 1917, 6


@pytest.fixture(scope="module")
def tortured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torture")
    out, docs = folder / "result.json", folder / "faults.md"
    command = [sys.executable, "-m", "tests.torture", "--seed", str(SEED), "--faults", str(FAULTS)]
    command += ["--variants", "1", "--jobs", "1", "--out", str(out), "--docs", str(docs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return json.loads(out.read_text()), docs.read_text()


def test_nothing_is_lost(tortured):
    result, docs = tortured
    injected = result["injected"]
    assert sum(injected.values()) == FAULTS and result["problems"] == [] and result["runs_finished"] >= 2
    wanted = {"kill in a save", "kill in an evaluation", "terminate in an evaluation", "another mesh", "damaged JSON"}
    assert wanted <= set(injected)
    assert set(DAMAGE) & set(injected) and 0 < result["longest_stop_seconds"] < 30
    assert f"{FAULTS} faults were injected" in docs and "| all | |" in docs


def test_every_kind_is_drawn_and_the_draw_follows_the_seed():
    import random

    for hosts in (1, 2):
        drawn = draw(random.Random(1), 200, hosts)
        assert drawn == draw(random.Random(1), 200, hosts) != draw(random.Random(2), 200, hosts)
        assert set(drawn) == {name for name, kind in KINDS.items() if kind.hosts == hosts}
        assert all(drawn.count(name) >= KINDS[name].weight for name in drawn)


def test_the_page_says_what_was_lost():
    result = {
        "injected": {"flipped byte": 3, "interrupt": 1},
        "problems": ["nag, seed 0, fault 2 (flipped byte): another state than the unbroken run"],
        "runs_finished": 2,
        "processes": 9,
        "commit": None,
        "seconds": 90.0,
        "cpus": 2,
        "seed": 0,
        "date": "2030-01-01",
        "versions": {"jax": "1", "orbax-checkpoint": "2"},
        "longest_stop_seconds": 0.5,
        "variants": {"nag": 4},
    }
    text = page(result)
    assert "| flipped byte | in a file of the newest checkpoint | 3 | 1 |" in text
    assert "| interrupt | SIGINT: must save and exit 130 | 1 | nothing |" in text and "| all | | 4 | 1 |" in text


def test_pieces_are_added():
    from tests.torture.__main__ import added

    old = {"injected": {"a": 1, "b": 2}, "variants": {"nag": 3}, "seconds": 1.5, "processes": 2}
    old |= {"runs_finished": 1, "problems": ["p"], "seed": 0, "commit": "x", "date": "d", "longest_stop_seconds": 2.0}
    new = old | {"injected": {"b": 1, "c": 4}, "seed": 1, "problems": [], "longest_stop_seconds": 1.0}
    both = added(added(old, new), new | {"seed": 2})
    assert both["injected"] == {"a": 1, "b": 4, "c": 8} and both["variants"] == {"nag": 9}
    assert (both["seed"], both["commit"], both["problems"]) == ("0 and 1 and 2", "x", ["p"])
    assert both["seconds"] == 4.5 and both["longest_stop_seconds"] == 2.0
