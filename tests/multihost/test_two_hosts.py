"""Two hosts are one run: the losses, batches and checkpoints of one process, and one decision on everything.

The runs are NAG's with Mixture-of-Depths; of other schemes a few steps are taken, and `make torture` has them all.

All of it is one test: with pytest-xdist, tests of one module go to different workers, and each would start the hosts.
"""

import dataclasses
import filecmp
import json
import shutil
import signal

import jax
import numpy as np
import pytest

from nagjax.data import DataConfig
from nagjax.residual import find_scheme
from nagjax.runs.metrics import comparable
from nagjax.runs.opening import open_run
from nagjax.train.batches import TrainBatches
from nagjax.train.checkpoint.store import Checkpoints, steps_saved
from nagjax.train.distributed.mesh import make_mesh
from nagjax.train.facts import resolve
from nagjax.train.loop import train
from nagjax.train.safety.guard import WINDOW
from nagjax.train.state import Blueprint
from tests import tiny
from tests.tolerance import assert_close

ASKED = "the quick"
SCHEMES = ("review", "highway_convex")  # gates in a kernel, gates in the model


def changed(config, **train):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **train))


def losses(folder):
    """Of training, of validation, and bits per byte of the answer to a question."""
    names = {"train": "loss", "eval": "loss", "tasks": "fox/bits_per_byte"}
    found = [(r, names[r["kind"]]) for r in comparable(folder / "metrics.jsonl") if r["kind"] in names]
    return {(record["kind"], record["step"]): record[name] for record, name in found}


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
        assert_close(other[at], loss, **tiny.steps(max(at[1], 1)), err_msg=str(at))


def of(notes, folder, what):
    """What each host recorded of a run."""
    return [[note for note in host if note.get("out") == str(folder) and what in note] for host in notes]


def joined(notes, folder):
    """The batches of both hosts, in order."""
    first, second = of(notes, folder, "batch")
    assert [note["batch"] for note in first] == [note["batch"] for note in second]
    return [(a["batch"], a["tokens"] + b["tokens"]) for a, b in zip(first, second, strict=True)]


@pytest.fixture
def alone(config, tmp_path_factory):
    """The run of one process, its batches, and a copy of it as it was after step 4, but for what its log has more."""
    folder, taken = tmp_path_factory.mktemp("alone"), []
    take = TrainBatches.take

    def taking(self, number):
        batch = take(self, number)
        taken.append((number, batch["tokens"].tolist()))
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainBatches, "take", taking)
        train(config, folder / "whole")
    shutil.copytree(folder / "whole", folder / "stopped")
    shutil.rmtree(folder / "stopped" / "checkpoints" / "6")
    return folder, taken


@pytest.fixture
def first_life(hosts, config, alone, tmp_path_factory):
    """Two hosts through all that they can survive; the last run loses the second of them in the evaluation
    after step 3, at its last batch: each evaluation scores two batches by top-k and two by the causal decider, and one
    of a task."""
    folder = tmp_path_factory.mktemp("two")
    other_rate = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=0.04))
    other_text = DataConfig(mix=tuple(one.replace("0.2", "0.3") for one in config.data.mix))
    long = changed(config, steps=WINDOW + 5, eval_every=1000, save_every=1000, on_bad_step="skip")
    runs = [
        dict(out="unbroken", asked=ASKED),
        dict(out="preempted", faults={1: {"at": 3, "signal": signal.SIGTERM}}),
        dict(out="raising", faults={1: {"nan": 2}}),
        dict(out="skipping", config=long, faults={1: {"nan": 2, "nonsense": WINDOW + 2}}),
        dict(out="rolled", config=changed(config, on_bad_step="rollback"), faults={1: {"nan": 2}}),
        dict(out="overdue", config=changed(config, save_every=6), faults={1: {"overdue": (1, 2)}}),
        dict(out="failing", faults={0: {"failing": True}}),
        dict(out="other_rate", faults={1: {"config": other_rate}}),
        dict(out="other_text", faults={1: {"config": dataclasses.replace(config, data=other_text)}}),
        dict(out="first_host", faults={1: {"out": str(shutil.copytree(alone[0] / "stopped", folder / "a_copy"))}}),
        dict(out="killed", faults={1: {"at": 10, "during": "evaluation", "signal": signal.SIGKILL}}),
    ]
    starts = [(scheme, tiny.start(scheme)) for scheme in (find_scheme(name)() for name in SCHEMES)]
    runs = [{"config": config} | run | {"out": str(folder / run["out"])} for run in runs]
    codes, notes, printed = hosts(*runs, schemes=starts)
    assert codes[1] == -signal.SIGKILL and codes[0], printed[0][-3000:] + printed[1][-3000:]
    copy = filecmp.dircmp(alone[0] / "stopped", folder / "a_copy")
    assert not (copy.left_only or copy.right_only or copy.diff_files)
    return folder, notes, printed


@pytest.fixture
def lives(hosts, config, alone, first_life):
    """The records of each life of the run that is killed: in the second one the first host is lost as it saves."""
    folder, stopped = first_life[0], alone[0] / "stopped"
    found = [first_life[1]]
    for faults in ({0: {"at": 6, "during": "save", "signal": signal.SIGKILL}}, {}):
        others = [] if faults else [folder / "preempted", stopped]
        runs = [dict(config=config, out=str(out)) for out in others]
        codes, notes, printed = hosts(*runs, dict(config=config, out=str(folder / "killed"), faults=faults))
        as_meant = codes[0] == -signal.SIGKILL and codes[1] if faults else codes == [0, 0]
        assert as_meant, printed[0][-3000:] + printed[1][-3000:]
        found.append(notes)
    return found


@pytest.fixture
def last_life(lives):
    return lives[-1]


def two_hosts_do_what_one_does(config, alone, first_life):
    (folder, notes, printed), (single, taken) = first_life, alone
    close(losses(single / "whole"), losses(folder / "unbroken"))
    assert ("tasks", 6) in losses(folder / "unbroken")
    assert joined(notes, folder / "unbroken") == taken and [number for number, _ in taken] == list(range(6))
    assert "loss" in printed[0] and "loss" not in printed[1]
    ours, theirs = state_of(config, folder / "unbroken"), state_of(config, single / "whole")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), ours.params, theirs.params)


def a_callback_may_write_and_read_logits(first_life):
    folder, notes, _ = first_life
    first, second = of(notes, folder / "unbroken", "written")
    assert first == second and len(first) == 3 and all(note["written"][0] for note in first)
    alone = open_run(folder / "unbroken").logits(ASKED)
    assert_close(np.array(first[-1]["logits"]), np.asarray(alone), **tiny.steps(6))


def schemes_have_the_losses_of_one_process(first_life):
    for host in first_life[1]:
        seen = {note["scheme"]: note["seen"] for note in host if "scheme" in note}
        for name in SCHEMES:
            alone = tiny.trained(find_scheme(name)())[0]
            assert_close(seen[name], alone, **tiny.steps(3), err_msg=name)


def killed_twice_equals_unbroken_bit_for_bit(config, first_life, lives):
    folder = first_life[0]
    same_bits(config, folder / "unbroken", folder / "killed")
    assert steps_saved(folder / "killed" / "checkpoints") == [2, 4, 6]
    right = [{note["batch"]: note["tokens"] for note in host} for host in of(lives[0], folder / "unbroken", "batch")]
    for life, notes in enumerate(lives):
        for mine, host in zip(right, of(notes, folder / "killed", "batch"), strict=True):
            numbers = [note["batch"] for note in host]
            start = numbers[0] if numbers else 6  # the last save may have been whole when its host died
            assert start in ([0], [0, 2], [4, 6])[life] and numbers == [*range(start, start + len(numbers))]
            assert all(note["tokens"] == mine[note["batch"]] for note in host)


def preempting_one_host_stops_and_saves_both(config, first_life, last_life):
    folder, notes, _ = first_life
    ends = of(notes, folder / "preempted", "end")
    assert [[(e["end"], e["code"]) for e in host] for host in ends] == [[("preempted", 0)]] * 2
    before, after = (joined(found, folder / "preempted") for found in (notes, last_life))
    assert before and after and before + after == joined(notes, folder / "unbroken")
    same_bits(config, folder / "unbroken", folder / "preempted")


def nan_on_one_host_ends_both(first_life):
    folder, notes, _ = first_life
    for (end,) in of(notes, folder / "raising", "end"):
        assert end["end"] == "refused" and "not finite at step 3" in end["message"]
    assert steps_saved(folder / "raising" / "checkpoints") == [2]


def nan_and_a_spike_on_one_host_are_skipped_by_both(config, first_life):
    folder, notes, _ = first_life
    for host in of(notes, folder / "skipping", "bad"):
        assert [note["bad"] for note in host] == [[3], [WINDOW + 3]] and host[1]["reason"] == "a spike"
    records = [r for r in comparable(folder / "skipping" / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["step"] for r in records if r.get("skipped")] == [3, WINDOW + 3] and len(records) == WINDOW + 5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state_of(config, folder / "skipping").params))


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


def hosts_that_are_not_alike_are_refused_and_nothing_is_written(first_life):
    folder, notes, _ = first_life
    for name, said in (("other_rate", "optimizer.lr = 0.04: on host 1, 0.03 on host 0"), ("other_text", "corpus.")):
        for (end,) in of(notes, folder / name, "end"):
            assert end["end"] == "refused" and said in end["message"]
        assert not (folder / name).exists()


def a_copy_of_the_folder_is_not_the_folder(first_life):
    folder, notes, _ = first_life
    first, second = of(notes, folder / "first_host", "end"), of(notes, folder / "a_copy", "end")
    assert all(
        end["end"] == "refused" and "host 1 does not see what host 0 writes" in end["message"]
        for end in [*first[0], *second[1]]
    )
    assert len(first[0]) == len(second[1]) == 1 and not list((folder / "first_host").iterdir())


def another_number_of_hosts_goes_on_from_a_checkpoint(config, alone, first_life, last_life):
    single, taken = alone
    close(losses(single / "whole"), losses(single / "stopped"))  # saved by one, restored by two
    assert joined(last_life, single / "stopped") == taken[4:]
    assert [r["step"] for r in comparable(single / "stopped" / "metrics.jsonl") if r["kind"] == "train"] == [
        *range(1, 7)
    ]
    state_of(config, first_life[0] / "unbroken")  # saved by two, restored by one


def test_two_hosts_are_one_run(config, alone, first_life, lives, last_life):
    schemes_have_the_losses_of_one_process(first_life)
    two_hosts_do_what_one_does(config, alone, first_life)
    a_callback_may_write_and_read_logits(first_life)
    killed_twice_equals_unbroken_bit_for_bit(config, first_life, lives)
    preempting_one_host_stops_and_saves_both(config, first_life, last_life)
    nan_on_one_host_ends_both(first_life)
    nan_and_a_spike_on_one_host_are_skipped_by_both(config, first_life)
    nan_on_one_host_rolls_both_back(first_life)
    the_clock_of_one_host_makes_both_save_once(first_life)
    a_save_that_fails_on_one_host_is_an_error_on_both(first_life)
    hosts_that_are_not_alike_are_refused_and_nothing_is_written(first_life)
    a_copy_of_the_folder_is_not_the_folder(first_life)
    another_number_of_hosts_goes_on_from_a_checkpoint(config, alone, first_life, last_life)
