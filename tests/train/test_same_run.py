"""A run continues only with its own settings, text and checkpoints; settings that change no batch may differ."""

import dataclasses
import json
import os
import re
import shutil
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from nagjax.data import DataConfig, open_dataset, preparation, prepare, read_manifest, store
from nagjax.errors import UserError
from nagjax.generate.evaluate import evaluate
from nagjax.report.compare import behind
from nagjax.runs import names
from nagjax.runs.folder import refuse_other_run
from nagjax.runs.identity import FREE_TO_CHANGE, JUDGEMENT, corpus_identity
from nagjax.runs.log import load_run
from nagjax.runs.metrics import comparable
from nagjax.runs.opening import open_run
from nagjax.train.checkpoint import manifest
from nagjax.train.checkpoint.manifest import read_manifest as checkpoint_manifest
from nagjax.train.checkpoint.store import Checkpoints, steps_saved
from nagjax.train.facts import resolve
from nagjax.train.loop import train


@pytest.fixture(scope="module")
def whole(run_of, tmp_path_factory):
    return train(run_of(keep=3), tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def half(whole, tmp_path):
    """The run as it was after four of its six steps."""
    shutil.copytree(whole, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / names.CHECKPOINTS / "6")
    return tmp_path / "half"


def moved(config, path, **data):
    return dataclasses.replace(config, data=DataConfig(path, **data))


def steps(folder):
    return steps_saved(folder / names.CHECKPOINTS)


def test_every_checkpoint_names_its_run(whole, run_of):
    run = json.loads((whole / names.IDENTITY).read_text())["id"]
    for step in steps(whole):
        named = checkpoint_manifest(whole / names.CHECKPOINTS / str(step))["owner"]
        assert named["run"] == run and named["step"] == step
        assert named["config"]["model.depth"] == 2 and named["config"]["train.seed"] == 0
        assert not {"data.path", "train.keep", "mesh.data"} & named["config"].keys()


def test_a_corpus_may_move_and_workers_may_come(whole, half, run_of, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "moved")
    with_workers = resolve(moved(run_of(keep=3), tmp_path / "moved", workers=1))
    refuse_other_run(half, with_workers, corpus_identity(open_dataset(with_workers.data)))
    train(moved(run_of(keep=3), tmp_path / "moved"), half)
    with (half / names.METRICS).open("a") as log:
        log.write('{"kind": "train", "st')  # of a run that is killed
    assert comparable(half / names.METRICS) == comparable(whole / names.METRICS)
    assert json.loads((half / names.CONFIG).read_text())["data"]["path"] == str(tmp_path / "moved")
    assert evaluate(half)["step"] == 6


@pytest.fixture(scope="module")
def other_corpus(corpus, tmp_path_factory):
    """Other text with as many documents, tokens and bytes in each split."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(corpus, folder / "corpus")
    path = folder / "corpus" / "manifest.json"
    for shard in [s for split in json.loads(path.read_text())["splits"].values() for s in split["shards"]]:
        tokens = folder / "corpus" / shard["tokens"]["name"]
        tokens.write_bytes(tokens.read_bytes().replace(b"q\0", b"Q\0"))
        digest = sha256(tokens.read_bytes()).hexdigest()
        path.write_text(path.read_text().replace(shard["tokens"]["sha256"], digest))
    return folder / "corpus"


def test_a_corpus_of_equal_counts_is_another_one(half, run_of, corpus, other_corpus):
    old, new = read_manifest(corpus), read_manifest(other_corpus)
    for what in ("token_count", "document_count", "byte_count"):
        assert old.total("train", what) == new.total("train", what)
    before = (half / names.METRICS).read_bytes()
    with pytest.raises(UserError, match="holds a run on another corpus: content was .* choose another --out"):
        train(moved(run_of(keep=3), other_corpus), half)
    assert (half / names.METRICS).read_bytes() == before


def test_an_evaluation_says_that_the_corpus_has_changed(whole, corpus, other_corpus, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    config = json.loads((run / names.CONFIG).read_text())
    config["data"]["path"] = str(other_corpus)
    (run / names.CONFIG).write_text(json.dumps(config))
    with pytest.raises(UserError, match="is not the text that the run was trained on.*--data"):
        evaluate(run)
    assert evaluate(run, data=str(other_corpus))["step"] == 6
    assert evaluate(run, data=corpus)["step"] == 6


def test_a_changed_shard_is_found(half, run_of, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "changed")
    shard = next((tmp_path / "changed").glob("train*.tokens"))
    shard.write_bytes(b"\x41\0" + shard.read_bytes()[2:])
    with pytest.raises(UserError, match=f"{shard.name}.*content changed"):
        train(moved(run_of(keep=3), tmp_path / "changed"), half)


def test_how_a_step_is_computed_may_change(whole, half, run_of):
    """On other devices a step may need less memory, or have other kernels."""
    config = run_of(keep=3)
    changed = {"remat": "block", "attention": "xla", "kernels": "xla"}
    assert all(getattr(config.model, name) != value for name, value in changed.items())
    train(dataclasses.replace(config, model=dataclasses.replace(config.model, **changed)), half)
    losses = [load_run(folder).train.loss for folder in (half, whole)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert json.loads((half / names.CONFIG).read_text())["model"]["remat"] == "block"


def test_what_a_run_keeps_is_named_and_fresh_is_not_the_first_advice(half, run_of):
    for change, words in (({"seed": 1}, "train.seed was 0 and is now 1"), ({"batch": 8}, "train.batch was 4")):
        with pytest.raises(UserError, match=words) as refused:
            train(run_of(keep=3, **change), half)
        said = str(refused.value)
        assert said.index("give these as they were") < said.index("--out (") < said.index("--fresh")


def test_a_checkpoint_of_another_run(half, run_of):
    other = Path(shutil.copytree(half / names.CHECKPOINTS / "4", half / names.CHECKPOINTS / "8"))
    named = checkpoint_manifest(other)
    settings = named["owner"]["config"] | {"train.seed": 5}
    manifest.write_manifest(other, named["facts"], {"run": "0" * 32, "config": settings, "step": 8})
    before = steps(half)
    for use in (lambda: train(run_of(keep=1), half), lambda: open_run(half)):
        with pytest.raises(UserError, match="checkpoints/8.*is of another run"):
            use()
    assert steps(half) == before == [2, 4, 8]


def test_a_renamed_checkpoint(half, run_of):
    (half / names.CHECKPOINTS / "4").rename(half / names.CHECKPOINTS / "5")
    for use in (lambda: train(run_of(keep=3), half), lambda: open_run(half)):
        with pytest.raises(UserError, match="checkpoints/5.*is of step 4"):
            use()


def test_settings_changed_by_hand(half, run_of):
    path = half / names.CONFIG
    path.write_text(path.read_text().replace('"alpha_power": 0.5', '"alpha_power": 1.0'))
    with pytest.raises(UserError, match="saved under other settings .*scheme.alpha_power was 0.5 and is now 1.0"):
        open_run(half)


def test_a_run_of_an_older_version_gets_an_id(whole, half, run_of):
    """Its manifests, called seal.json, name nobody."""
    (half / names.IDENTITY).unlink()
    for step in steps(half):
        folder = half / names.CHECKPOINTS / str(step)
        body = json.loads((folder / names.MANIFEST).read_text())
        body = {name: body[name] for name in ("facts", "files")}
        (folder / names.SEAL).write_text(json.dumps(body | {"sha256": manifest._digest(body)}))
        (folder / names.MANIFEST).unlink()
    assert open_run(half).step == 4
    train(run_of(keep=3), half)
    assert comparable(half / names.METRICS) == comparable(whole / names.METRICS)
    run = json.loads((half / names.IDENTITY).read_text())["id"]
    assert checkpoint_manifest(half / names.CHECKPOINTS / "6")["owner"]["run"] == run
    assert checkpoint_manifest(half / names.CHECKPOINTS / "2")["owner"] == {}


def test_a_log_that_ends_before_the_checkpoint_is_said_to(whole, half):
    assert behind(load_run(whole)) is None
    lines = [line for line in (whole / names.METRICS).read_text().splitlines() if json.loads(line)["step"] <= 3]
    (half / names.METRICS).write_text("\n".join(lines) + "\n")
    assert "checkpoint of step 4, and its log ends at step 3" in behind(load_run(half))


def linked(path):
    path.rename(path.parents[1] / "outside")
    path.symlink_to(path.parents[1] / "outside")


def other_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


HARM = {
    **{f"{name} is a link": (name, linked) for name in (names.METRICS, names.CONFIG, names.CORPUS, names.INFO)},
    "a batch too many": (names.SKIPPED, lambda path: path.write_text("[1")),
    "a damaged checkpoint": (f"{names.CHECKPOINTS}/4", lambda path: other_byte(largest(path))),
    "a damaged manifest": (f"{names.CHECKPOINTS}/4/{names.MANIFEST}", other_byte),
}


def largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("name, harm", HARM.values(), ids=HARM)
def test_a_refusal_changes_nothing(half, run_of, monkeypatch, name, harm):
    """The clock is another one, and the log is ahead of the checkpoint: both would show."""
    monkeypatch.setattr("nagjax.runs.facts.now", lambda: "2001-01-01T00:00:00+00:00")
    harm(half / name)
    before = contents(half)
    with pytest.raises(UserError, match=re.escape(name.partition("/")[0])):
        train(run_of(keep=3), half)
    assert contents(half) == before


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != names.LOCK}


def test_other_libraries_are_an_event_and_what_an_older_version_did_not_note_is_no_change(half, run_of):
    info = json.loads((half / names.INFO).read_text())
    info["versions"]["jax"], info["device"] = "0.0.1", "abacus"
    assert info.pop("judged_by") == {"on_bad_step": "raise", "spike": 0.0, "max_bad_steps": 5}
    (half / names.INFO).write_text(json.dumps(info))
    train(run_of(keep=3, spike=6.0), half)
    (event,) = [e.message for e in load_run(half).events]
    assert event.startswith("resumed under device ") and "(was abacus)" in event and "(was 0.0.1)" in event
    assert "spike" not in event


def test_the_log_tells_what_decides_on_updates_from_now_on_and_is_never_replaced(half, run_of):
    """A process that follows it sees the same file."""
    changed = {"on_bad_step": "skip", "spike": 6.0, "max_bad_steps": 9}
    assert {f"train.{name}" for name in changed} == {f"train.{name}" for name in JUDGEMENT} < FREE_TO_CHANGE
    with (half / names.METRICS).open() as follower:
        before = os.fstat(follower.fileno()).st_ino
        train(run_of(keep=3, **changed), half)
        assert (half / names.METRICS).stat().st_ino == before
        assert follower.read() == (half / names.METRICS).read_text()
    (event,) = [e.message for e in load_run(half).events]
    for words in ("train.on_bad_step skip (was raise)", "train.spike 6.0 (was 0.0)", "train.max_bad_steps 9 (was 5)"):
        assert words in event


def test_a_checkpoint_removed_by_hand_stops_nothing(whole, run_of, tmp_path, monkeypatch):
    save = Checkpoints.save

    def removing(self, step, *given):
        save(self, step, *given)
        self.wait()
        if step == 2:
            shutil.rmtree(self.folder / "2")
        if step == 4:
            shutil.rmtree(self.folder)

    monkeypatch.setattr(Checkpoints, "save", removing)
    run = train(run_of(keep=1), tmp_path / "run")
    assert steps(run) == [6] and comparable(run / names.METRICS) == comparable(whole / names.METRICS)


def test_when_no_checkpoint_is_intact_the_run_stays_what_it_is(half, run_of):
    """Until one of them is brought back."""
    shutil.copytree(half / names.CHECKPOINTS / "4", half / "kept")
    for step in steps(half):
        (half / names.CHECKPOINTS / str(step) / names.MANIFEST).unlink()
    for skip in (True, False):
        with pytest.raises(UserError, match="no intact checkpoint"):
            train(run_of(keep=3), half, skip_damaged=skip)
    with pytest.raises(UserError, match="train.seed was 0"):
        train(run_of(keep=3, seed=1), half)
    (half / "kept").rename(half / names.CHECKPOINTS / "4")
    train(run_of(keep=3), half)
    assert steps(half) == [4, 6]


def test_memory_is_checked_for_what_will_be_trained(whole, run_of, monkeypatch):
    def refuse(blueprint):
        raise UserError("memory", "", "too little")

    monkeypatch.setattr("nagjax.train.loop.check_memory", refuse)
    before = contents(whole)
    train(run_of(keep=3), whole)  # is finished
    with pytest.raises(UserError, match="memory"):
        train(run_of(keep=3), whole, fresh=True)
    assert contents(whole) == before


def test_a_folder_of_something_else_is_refused(run_of, tmp_path):
    model = {names.CONFIG: '{"model_type": "qwen3"}', names.TOKENIZER: "{}"}
    for name, text in model.items():
        (tmp_path / name).write_text(text)
    for fresh in (False, True):
        with pytest.raises(UserError, match="not that of a run.*choose another --out"):
            train(run_of(), tmp_path, fresh=fresh)
    assert {name: (tmp_path / name).read_text() for name in model} == model


def test_what_a_run_without_checkpoints_has_left_is_removed(half, run_of, corpus):
    """Its tokenizer would be taken for the next one's."""
    shutil.rmtree(half / names.CHECKPOINTS)
    (half / names.TOKENIZER).write_text("{}")
    (half / names.ORIGIN).write_text('{"tokenizer_vocab": 9, "end_of_text": 0}')
    train(run_of(keep=3), half)
    assert open_run(half).step == 6


def test_token_ids_beyond_the_vocabulary(run_of, corpus, tmp_path, monkeypatch):
    shutil.copytree(corpus, tmp_path / "corpus")
    for shard in (tmp_path / "corpus").glob("*.tokens"):
        shard.write_bytes(shard.read_bytes().replace(b"q\0", b"\xff\x7f"))
    monkeypatch.setattr(store, "SMALL", 0)
    with pytest.raises(UserError, match="token id = 32767: the model has ids up to 256"):
        train(moved(run_of(), tmp_path / "corpus"), tmp_path / "run")


def test_prepared_inputs_are_known_by_content(tmp_path):
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("all work and no play " * 50)
    made = prepare([str(text)], out, validation=0.0)
    text.rename(tmp_path / "b.txt")
    assert prepare([str(tmp_path / "b.txt")], out, validation=0.0) == made  # moved
    (tmp_path / "b.txt").write_text("all work and no joy! " * 50)
    with pytest.raises(UserError, match="holds another corpus already .*b.txt in inputs has changed"):
        prepare([str(tmp_path / "b.txt")], out, validation=0.0)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["source"]["inputs"] = [entry[:2] for entry in manifest["source"]["inputs"]]  # as older versions had it
    manifest["source"]["inputs"][0][0] = str(tmp_path / "b.txt")
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert prepare([str(tmp_path / "b.txt")], out, validation=0.0).content == made.content


def test_an_input_that_changes_while_it_is_read(tmp_path, monkeypatch):
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("all work and no play " * 50)
    read = preparation.split_documents

    def changing(inputs, validation, **options):
        for document in read(inputs, validation, **options):
            yield document
            Path(text).write_text("all work and no joy! " * 50)
            os.utime(text, ns=(time.time_ns() + 10**9,) * 2)

    monkeypatch.setattr(preparation, "split_documents", changing)
    with pytest.raises(UserError, match="a.txt.*changed while it was read"):
        prepare([str(text)], out, validation=0.0)
    assert not (out / "manifest.json").exists()
    monkeypatch.undo()
    prepare([str(text)], out, validation=0.0)
