"""Two hosts are one run: the losses, batches and checkpoints of one process, and one decision on everything.

All of it is one test: with pytest-xdist, tests of one module go to different workers, and each would start the hosts.
"""

import dataclasses
import json
import signal

import jax
import numpy as np
import pytest

from nagjax.train.checkpoint import Checkpoints, steps_saved
from nagjax.train.facts import resolve
from nagjax.train.loop import train
from nagjax.train.mesh import make_mesh
from nagjax.train.metrics import comparable
from nagjax.train.run import Run
from nagjax.train.state import Blueprint
from nagjax.train.stream import TrainStream

BY_ANOTHER_SUM = 1e-5  # relative: hosts add up gradients in another order


def changed(config, **train):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **train))


def losses(folder):
    return {(r["kind"], r["step"]): r["loss"] for r in comparable(folder / "metrics.jsonl") if "loss" in r}


def state_of(config, folder):
    config = resolve(config)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return jax.device_get(checkpoints.restore(Blueprint.of(config, make_mesh(config.mesh)).abstract()))


def same_bits(config, one, other):
    assert comparable(one / "metrics.jsonl") == comparable(other / "metrics.jsonl")
    jax.tree.map(np.testing.assert_array_equal, state_of(config, one), state_of(config, other))


def close(one, other):
    assert one.keys() == other.keys()
    for at, loss in one.items():
        np.testing.assert_allclose(other[at], loss, rtol=BY_ANOTHER_SUM, err_msg=str(at))


def of(notes, folder, what):
    """What each host noted of a run."""
    return [[note for note in host if note["out"] == str(folder) and what in note] for host in notes]


def joined(notes, folder):
    """The batches of both hosts, in order."""
    first, second = of(notes, folder, "batch")
    assert [note["batch"] for note in first] == [note["batch"] for note in second]
    return [(a["batch"], a["tokens"] + b["tokens"]) for a, b in zip(first, second, strict=True)]


@pytest.fixture
def alone(programs, config, tmp_path_factory):
    """The run of one process, its batches, and a copy of it stopped after step 4."""
    folder, taken = tmp_path_factory.mktemp("alone"), []
    take, step = TrainStream.take, Run._step

    def taking(self, number):
        batch = take(self, number)
        taken.append((number, batch["tokens"].tolist()))
        return batch

    def stopping(self):
        bad = step(self)
        if self.done == 4:
            signal.raise_signal(signal.SIGINT)
        return bad

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStream, "take", taking)
        train(config, folder / "whole")
        patch.setattr(TrainStream, "take", take)
        patch.setattr(Run, "_step", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(config, folder / "stopped")
    return folder, taken


@pytest.fixture
def first_life(hosts, config, alone, tmp_path_factory):
    """Two hosts through all that they can survive; the last run kills them."""
    folder = tmp_path_factory.mktemp("two")
    term, kill = {"at": 3, "signal": signal.SIGTERM}, {"at": 5, "signal": signal.SIGKILL}
    runs = [
        dict(out="unbroken"),
        dict(out="preempted", faults={1: term}),
        dict(out="skipping", config=changed(config, on_bad_step="skip"), faults={1: {"nan": 2}}),
        dict(out="rolled", config=changed(config, on_bad_step="rollback"), faults={1: {"nan": 2}}),
        dict(out="overdue", config=changed(config, save_every=6), faults={1: {"overdue": (1, 2)}}),
        dict(out="failing", faults={0: {"failing": True}}),
        dict(out="killed", faults={0: kill, 1: kill}),
    ]
    codes, notes, printed = hosts(*({"config": config} | run | {"out": str(folder / run["out"])} for run in runs))
    # The one that is killed first may take the other with it before that comes to kill itself.
    assert -signal.SIGKILL in codes and 0 not in codes, printed[0][-3000:] + printed[1][-3000:]
    return folder, notes, printed


@pytest.fixture
def second_life(hosts, config, alone, first_life):
    """The same commands again."""
    folder, stopped = first_life[0], alone[0] / "stopped"
    outs = [folder / "preempted", folder / "killed", stopped]
    codes, notes, printed = hosts(*(dict(config=config, out=str(out)) for out in outs))
    assert codes == [0, 0], printed[0][-3000:] + printed[1][-3000:]
    return notes


def two_hosts_do_what_one_does(config, alone, first_life):
    (folder, notes, printed), (single, taken) = first_life, alone
    close(losses(single / "whole"), losses(folder / "unbroken"))
    assert joined(notes, folder / "unbroken") == taken and [number for number, _ in taken] == list(range(6))
    assert "loss" in printed[0] and "loss" not in printed[1]
    ours, theirs = state_of(config, folder / "unbroken"), state_of(config, single / "whole")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), ours.params, theirs.params)


def killed_in_the_middle_and_resumed_equals_unbroken_bit_for_bit(config, first_life, second_life):
    folder = first_life[0]
    same_bits(config, folder / "unbroken", folder / "killed")
    resumed = steps_saved(folder / "killed" / "checkpoints")
    assert resumed == [2, 4, 6]
    assert [number for number, _ in joined(second_life, folder / "killed")] in ([2, 3, 4, 5], [4, 5])


def preempting_one_host_stops_and_saves_both(config, first_life, second_life):
    folder, notes, _ = first_life
    ends = of(notes, folder / "preempted", "end")
    assert [[(e["end"], e["code"]) for e in host] for host in ends] == [[("preempted", 0)]] * 2
    before, after = (joined(found, folder / "preempted") for found in (notes, second_life))
    assert before and after and before + after == joined(notes, folder / "unbroken")
    same_bits(config, folder / "unbroken", folder / "preempted")


def nan_on_one_host_is_skipped_by_both(config, first_life):
    folder, notes, _ = first_life
    assert [[note["bad"] for note in host] for host in of(notes, folder / "skipping", "bad")] == [[[3]]] * 2
    records = [r for r in comparable(folder / "skipping" / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["step"] for r in records if r.get("skipped")] == [3] and len(records) == 6
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state_of(config, folder / "skipping").params))
    close(
        {at: loss for at, loss in losses(folder / "unbroken").items() if at[1] < 3},
        {at: loss for at, loss in losses(folder / "skipping").items() if at[1] < 3},
    )


def nan_on_one_host_rolls_both_back(first_life):
    folder, notes, _ = first_life
    assert json.loads((folder / "rolled" / "skipped.json").read_text()) == {"batches": [2]}
    numbers = [number for number, _ in joined(notes, folder / "rolled")]
    assert numbers[:3] == [0, 1, 2] and numbers[-4:] == [3, 4, 5, 6]
    assert [[e["end"] for e in host] for host in of(notes, folder / "rolled", "end")] == [["finished"]] * 2


def the_clock_of_one_host_makes_both_save_once(first_life):
    folder, notes, _ = first_life
    assert steps_saved(folder / "overdue" / "checkpoints") == [3, 6]
    assert [[e["end"] for e in host] for host in of(notes, folder / "overdue", "end")] == [["finished"]] * 2


def a_save_that_fails_on_one_host_is_an_error_on_both(first_life):
    folder, notes, _ = first_life
    for (end,) in of(notes, folder / "failing", "end"):
        assert end["end"] == "refused" and "Input/output error" in end["message"]
    assert steps_saved(folder / "failing" / "checkpoints") == []


def another_number_of_hosts_goes_on_from_a_checkpoint(config, alone, first_life, second_life):
    single, taken = alone
    close(losses(single / "whole"), losses(single / "stopped"))  # saved by one, restored by two
    assert joined(second_life, single / "stopped") == taken[4:]
    assert [r["step"] for r in comparable(single / "stopped" / "metrics.jsonl") if r["kind"] == "train"] == [
        *range(1, 7)
    ]
    state_of(config, first_life[0] / "unbroken")  # saved by two, restored by one


def test_two_hosts_are_one_run(config, alone, first_life, second_life):
    two_hosts_do_what_one_does(config, alone, first_life)
    killed_in_the_middle_and_resumed_equals_unbroken_bit_for_bit(config, first_life, second_life)
    preempting_one_host_stops_and_saves_both(config, first_life, second_life)
    nan_on_one_host_is_skipped_by_both(config, first_life)
    nan_on_one_host_rolls_both_back(first_life)
    the_clock_of_one_host_makes_both_save_once(first_life)
    a_save_that_fails_on_one_host_is_an_error_on_both(first_life)
    another_number_of_hosts_goes_on_from_a_checkpoint(config, alone, first_life, second_life)
