"""Preparation on Apache Beam leaves the files of the local run; without Beam, its plan still cuts the same rounds."""

import gzip
import importlib.util
import inspect
import json
from pathlib import Path

import pytest

from nagjax.cli import main
from nagjax.data import beam, preparation, prepare, verify
from nagjax.data.store import read_manifest
from nagjax.data.tokenizer import ByteTokenizer
from nagjax.errors import UserError

installed = importlib.util.find_spec("apache_beam") is not None
needs_beam = pytest.mark.skipif(not installed, reason="Apache Beam is not installed: see constraints-beam.txt")


def content(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


def in_this_process(monkeypatch):
    """Runs the workers' part in this process, one worker after the other, without Beam."""

    def run(todo, work, options):
        for one in todo:
            one.make(work)

    monkeypatch.setattr(beam, "_run", run)
    monkeypatch.setattr(beam, "_installed", lambda: True)


@pytest.fixture(scope="module")
def inputs(texts, tmp_path_factory):
    """Files of several kinds, of which one is empty and one is held out."""
    folder = tmp_path_factory.mktemp("inputs")
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join(lines[:20]) + '{"text": ""}\n')
    (folder / "b.jsonl").write_text('{"text": ""}\n')
    with gzip.open(folder / "c.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("".join(lines[20:]))
    (folder / "d.txt").write_text("a text of its own\n")
    extra = tmp_path_factory.mktemp("extra") / "held.txt"
    extra.write_text("held out\n")
    return [str(folder)], [str(extra)]


def both(runs, inputs, tmp_path, **given):
    prepare(inputs[0], tmp_path / "local", held_out=inputs[1], **given)
    runs(inputs[0], tmp_path / "beam", held_out=inputs[1], **given)
    assert content(tmp_path / "beam") == content(tmp_path / "local")


@pytest.mark.parametrize("shard_tokens", [1, 700, 7000, 1 << 20])
def test_the_plan_cuts_the_local_rounds(inputs, tmp_path, monkeypatch, shard_tokens):
    in_this_process(monkeypatch)
    both(beam.prepare_on_beam, inputs, tmp_path, validation=0.2, shard_tokens=shard_tokens)


def test_a_piece_whose_documents_have_no_tokens_keeps_them(tmp_path, monkeypatch):
    """A tokenizer that drops white space, as BERT's, makes a document of its end alone."""

    class Words(ByteTokenizer):
        def encode_batch(self, texts):
            return super().encode_batch(["".join(text.split()) for text in texts])

    in_this_process(monkeypatch)
    monkeypatch.setattr(preparation, "load_tokenizer", lambda name: Words())
    for name, text in (("a.txt", "two words"), ("b.txt", "\n\n")):
        (tmp_path / name).write_text(text)
    both(beam.prepare_on_beam, ([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], []), tmp_path, validation=0.0)
    (shard,) = read_manifest(tmp_path / "beam").splits["train"]
    assert (shard.document_count, shard.token_count) == (2, len("twowords") + 2)


def test_a_stopped_run_goes_on(inputs, tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    prepare(inputs[0], tmp_path / "local", validation=0.2, shard_tokens=3000)
    whole, made = beam.write_shard, []

    def stopping(*args):
        made.append(args[2])
        if len(made) == 4:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(beam, "write_shard", stopping)
    with pytest.raises(KeyboardInterrupt):
        beam.prepare_on_beam(inputs[0], tmp_path / "beam", validation=0.2, shard_tokens=3000)
    with pytest.raises(UserError, match="not finished"):
        verify(tmp_path / "beam")
    with pytest.raises(UserError, match="begun with --runner beam"):
        prepare(inputs[0], tmp_path / "beam", validation=0.2, shard_tokens=3000)
    with pytest.raises(UserError, match="unfinished corpus of another request"):
        beam.prepare_on_beam(inputs[0], tmp_path / "beam", validation=0.3, shard_tokens=3000)
    beam.prepare_on_beam(inputs[0], tmp_path / "beam", validation=0.2, shard_tokens=3000)
    assert content(tmp_path / "beam") == content(tmp_path / "local")


def test_what_a_stopped_run_of_other_inputs_left_is_not_taken_up(inputs, texts, tmp_path, monkeypatch):
    """`rm -r out/*` leaves the hidden folder of pieces."""
    in_this_process(monkeypatch)
    other = tmp_path / "other.txt"
    other.write_text("another text")
    monkeypatch.setattr(beam, "_run", lambda todo, work, options: [beam._make(one, work) for one in todo])
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(beam, "plan", interrupt)
        beam.prepare_on_beam(str(other), tmp_path / "beam", validation=0.0)
    (tmp_path / "beam" / "progress.json").unlink()
    both(beam.prepare_on_beam, inputs, tmp_path, validation=0.2)


def test_a_link_in_the_place_of_the_pieces_is_refused_before_anything_is_written(inputs, tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(beam, "plan", interrupt)
        beam.prepare_on_beam(inputs[0], tmp_path / "beam", validation=0.0)
    (stage,) = [path for path in (tmp_path / "beam").iterdir() if path.is_dir()]
    stage.rename(tmp_path / "away")
    stage.symlink_to(tmp_path / "away")
    for path in (tmp_path / "away").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="is a link"):
        beam.prepare_on_beam(inputs[0], tmp_path / "beam", validation=0.0)
    assert not [*(tmp_path / "away").iterdir()]


def interrupt(*_):
    raise KeyboardInterrupt


@needs_beam
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_beam_leaves_the_local_files(inputs, tmp_path, request, kind):
    tokenizer = kind if kind == "bytes" else request.getfixturevalue(kind)
    both(beam.prepare_on_beam, inputs, tmp_path, validation=0.2, shard_tokens=3000, tokenizer=tokenizer)


@needs_beam
def test_command_with_beams_own_options(inputs, tmp_path):
    command = ["data", "prepare", *inputs[0], "--validation", "0.2", "--out"]
    assert main([*command, str(tmp_path / "local")]) == 0
    options = ["--runner=FnApiRunner", "--direct_num_workers=2", "--direct_running_mode=multi_threading"]
    assert main([*command, str(tmp_path / "beam"), "--runner", "beam", "--", *options]) == 0
    assert content(tmp_path / "beam") == content(tmp_path / "local")


@needs_beam
def test_a_bad_input_is_named_and_mended(inputs, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{"words": 1}\n')
    with pytest.raises(UserError, match="bad.jsonl:2.*no text in field"):
        beam.prepare_on_beam([*inputs[0], str(bad)], tmp_path / "out", validation=0.2)


@pytest.mark.skipif(installed, reason="Apache Beam is installed")
def test_without_beam_the_error_says_what_to_install(inputs, tmp_path, capsys):
    assert main(["data", "prepare", *inputs[0], "--out", str(tmp_path / "out"), "--runner", "beam"]) == 2
    assert "constraints-beam.txt" in capsys.readouterr().err


def test_what_else_prepare_takes_is_said():
    missing = inspect.signature(prepare).parameters.keys() - inspect.signature(beam.prepare_on_beam).parameters.keys()
    assert all(f"`{name}`" in beam.prepare_on_beam.__doc__ for name in missing)


def test_only_beam_takes_further_options(inputs, tmp_path, capsys):
    assert main(["data", "prepare", *inputs[0], "--out", str(tmp_path / "out"), "--", "--runner=DataflowRunner"]) == 2
    assert "only --runner beam" in capsys.readouterr().err
