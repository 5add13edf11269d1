"""Every kind of bad input gives one line with field, value and fix, and exit code 2, and damages nothing saved."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from nagjax.cli import main
from nagjax.train.checkpoint.store import steps_saved

TINY = "--scheme nag --depth 2 --width 16 --context 32 --batch 8 --eval-batches 1 --mesh.data 1".split()


def fails(capsys, args, *words):
    """Runs the command, which must fail with one line that holds all the words; at most one line may precede it."""
    capsys.readouterr()
    assert main([str(a) for a in args]) == 2
    *before, error = capsys.readouterr().err.strip().splitlines()
    assert len(before) <= 1 and error.startswith("nagjax: error: "), (before, error)
    for word in words:
        assert word in error, (word, error)


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * 20)
    out = folder / "corpus"
    assert main(["data", "prepare", str(folder), "--out", str(out), "--validation", "0.3"]) == 0
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", *TINY, "--data.path", str(corpus), "--steps", "2", "--out", str(folder)]) == 0
    return folder


def test_unknown_command(capsys):
    fails(capsys, ["trian"], "command = 'trian'", "did you mean 'train'")


def test_unknown_scheme_suggests_the_nearest(capsys):
    fails(capsys, ["train", "--scheme", "nga"], "scheme = 'nga'", "did you mean 'nag'", "plain")


def test_unknown_preset(capsys):
    fails(capsys, ["train", "--preset", "7T"], "preset = '7T'", "350M")


def test_width_not_divisible_by_heads(capsys):
    fails(capsys, ["train", "--width", "96", "--heads", "7"], "heads = 7", "width 96", "nearest: ")


def test_scheme_options_are_checked(capsys):
    fails(capsys, ["train", "--scheme", "nag", "--scheme.ramp", "1.5"], "scheme.ramp = 1.5", "at least 0 and below 1")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--scheme plain --scheme.scaled-start false", "--scheme.scaled-start = 'false': takes no value"),
        ("--no-qk-norm True", "--no-qk-norm = 'True': takes no value: give --qk-norm or --no-qk-norm alone"),
        ("--scheme plain --scheme.scaled-start=0", "--scheme.scaled-start = '0': takes no value"),
        ("--kernels=", "--kernels = '': takes no value"),
    ],
)
def test_a_switch_with_a_value(capsys, words, named):
    fails(capsys, ["info", *words.split()], named)


def test_batch_not_divisible_by_the_mesh(capsys, corpus, tmp_path):
    args = [*TINY[:-2], "--batch", "6", "--mesh.data", "4", "--data.path", corpus, "--out", tmp_path / "r"]
    fails(capsys, ["train", *args], "batch = 6", "data x fsdp = 4", "try 4")
    assert not (tmp_path / "r").exists()


def test_mesh_larger_than_the_machine(capsys, corpus, tmp_path):
    args = [*TINY, "--mesh.fsdp", "4096", "--data.path", corpus, "--out", tmp_path / "r"]
    fails(capsys, ["train", *args], "mesh = ", "4096", "devices")


def test_kernels_of_another_platform(capsys, corpus, tmp_path):
    args = [*TINY, "--kernels", "mosaic_tpu", "--data.path", corpus, "--out", tmp_path / "r"]
    fails(capsys, ["train", *args], "kernels = 'mosaic_tpu'", "tpu only", "use auto")


def test_absent_corpus(capsys, tmp_path):
    fails(capsys, ["train", *TINY, "--data.path", tmp_path / "nowhere", "--out", tmp_path / "r"], "nowhere")


def test_empty_corpus(capsys, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "empty.txt").write_text("")
    fails(capsys, ["data", "prepare", tmp_path / "text", "--out", tmp_path / "c"], "inputs = ", "no text in them")


def test_truncated_shard(capsys, corpus, tmp_path):
    copy = tmp_path / "corpus"
    subprocess.run(["cp", "-r", str(corpus), str(copy)], check=True)
    shard = max(copy.rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    shard.write_bytes(shard.read_bytes()[:-7])
    fails(capsys, ["train", *TINY, "--data.path", copy, "--out", tmp_path / "r"], shard.name)


def test_checkpoint_of_another_config(capsys, run, corpus):
    before = contents(run)
    args = [*TINY, "--data.path", corpus, "--steps", "2", "--out", run, "--width", "32", "--lr", "0.1"]
    fails(
        capsys,
        ["train", *args],
        "model.width was 16 and is now 32",
        "optimizer.lr was not given and is now 0.1",
        "--fresh",
    )
    assert contents(run) == before


@pytest.mark.parametrize("word", ["runs/mine", "text.txt"])
def test_a_word_in_the_place_of_a_file_of_options(capsys, word):
    fails(capsys, ["train", word, "--depth", "1"], f"config = '{word}'", "NAME.yaml", f"--out {word}")


def test_an_option_of_the_command_in_a_file_of_a_runs_options(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text("depth: 1\nout: here\n")
    fails(
        capsys,
        ["train", tmp_path / "mine.yaml"],
        "out = 'here'",
        "not an option of a run",
        "give --out PATH on the command line",
    )


def test_a_rejected_command_does_not_block_the_corrected_one(capsys, corpus, tmp_path):
    common = [*TINY, "--data.path", corpus, "--steps", "1", "--out", tmp_path / "r"]
    fails(capsys, ["train", *common, "--context", "99000000"], "context = 99000000")
    assert main([str(a) for a in ["train", *common]]) == 0


def test_out_is_a_file(capsys, corpus, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "under"):
        fails(capsys, ["train", *TINY, "--data.path", corpus, "--out", out], "out", str(out), "--out")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_damaged_config_of_a_run(capsys, run, corpus, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "config.json").write_text("")
    args = [*TINY, "--data.path", corpus, "--steps", "2", "--out", copy]
    fails(capsys, ["train", *args], "config.json", "cannot be read", "bring it back")


def test_a_damaged_checkpoint(capsys, run, corpus, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints").rglob("*"):
        if path.is_file() and path.stat().st_size > 2000:
            path.write_bytes(path.read_bytes()[:100])
    fails(capsys, ["generate", copy, "--tokens", "4"], "checkpoint = ", str(copy), "is damaged")


def test_a_corpus_prepared_anew_is_not_taken_for_the_old_one(capsys, run, corpus):
    held, before = corpus.with_name("held"), contents(run)
    text = corpus.with_name("other")
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"number {i}: " + "something else entirely. " * 30)
    corpus.rename(held)
    try:
        assert main(["data", "prepare", str(text), "--out", str(corpus), "--validation", "0.3"]) == 0
        args = [*TINY, "--data.path", corpus, "--steps", "2", "--out", run]
        fails(capsys, ["train", *args], "another corpus", "tokens was", "choose another --out")
        assert contents(run) == before
    finally:
        shutil.rmtree(corpus, ignore_errors=True)
        held.rename(corpus)


def test_attention_of_another_platform(capsys, corpus, tmp_path):
    args = [*TINY, "--attention", "splash", "--data.path", corpus, "--out", tmp_path / "r"]
    fails(capsys, ["train", *args], "attention = 'splash'", "tpu only", "use auto")


def test_finished_run_is_left_alone(run, corpus):
    before = contents(run)
    assert main(["train", *TINY, "--data.path", str(corpus), "--steps", "2", "--out", str(run)]) == 0
    assert contents(run) == before


def test_prompt_longer_than_the_context(capsys, run):
    fails(capsys, ["generate", run, "--prompt", "x" * 40, "--tokens", "4"], "prompt", "40", "32")


def test_not_a_run(capsys, tmp_path):
    for command in ("eval", "generate", "info"):
        fails(capsys, [command, tmp_path], str(tmp_path))


def test_compare_needs_two_runs(capsys, run):
    fails(capsys, ["compare", run], "runs = ", "give two or more run folders")


def test_no_write_permission(capsys, monkeypatch, tmp_path):
    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    fails(capsys, ["train", *TINY, "--out", tmp_path / "r"], "out", "no permission", "--out")


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from nagjax.cli import main
sys.exit(main(sys.argv[2:]))
"""


def limited(args, limit):
    """Runs the command in a process whose files may not exceed `limit` bytes: writing fails as on a full disk."""
    command = [sys.executable, "-c", LIMITED, str(limit), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_full_disk_while_preparing(tmp_path):
    (tmp_path / "big.txt").write_text("all work and no play " * 50_000)
    done = limited(["data", "prepare", tmp_path / "big.txt", "--out", tmp_path / "c"], 200_000)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "nagjax: error: " in done.stderr and str(tmp_path / "c") in done.stderr
    assert main(["data", "prepare", str(tmp_path / "big.txt"), "--out", str(tmp_path / "c")]) == 0


def test_full_disk_while_saving_keeps_the_last_checkpoint(corpus, tmp_path):
    out = tmp_path / "run"
    args = ["train", *TINY, "--scheme", "plain", "--width", "64", "--data.path", corpus, "--steps", "4"]
    args = [*map(str, args), "--save-every", "2", "--out", str(out)]
    assert main(args) == 0
    shutil.rmtree(out / "checkpoints" / "4")
    before = contents(out / "checkpoints" / "2")
    done = limited(args, 100_000)
    assert done.returncode == 2, done.stderr[-2000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("nagjax: error: ") and "checkpoint" in last, last
    assert "Traceback" not in done.stderr
    assert contents(out / "checkpoints" / "2") == before and steps_saved(out / "checkpoints") == [2]
    assert main(args) == 0
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4


def test_files_of_other_formats_in_a_folder_are_told(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "b.csv", "c.json"):
        (folder / name).write_text("some words\n" * 9)
    assert main(["data", "prepare", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert f"left out, of other formats: {folder / 'b.csv'}, {folder / 'c.json'}\n" in capsys.readouterr().err


def test_a_run_whose_text_lies_elsewhere_now(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words and some more\n" * 99)
    assert main(["data", "prepare", "a.txt", "--out", "text"]) == 0
    small = "--scheme plain --depth 1 --width 16 --context 16 --steps 1 --batch 8 --eval-batches 1".split()
    assert main(["train", *small, "--data.path", "text", "--out", "run"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fails(capsys, ["eval", "../run"], "data.path = 'text'", "does not exist", "go there, or give --data")


@pytest.mark.parametrize(
    "command",
    [
        "average {run} --out file/a", "bench step --out file/b.json", "compare {run} other --out file",
        "data prepare t.txt --out file", "demo --out file", "diagnose {run} --out file",
        "export {run} --format bundle --out file/e", "map {run} --text a --out file", "profile --out file",
        "prune {run} --curve --out file", "prune {run} --blocks 1 --out file/p", "train --out file",
        "tokenizer train t.txt --vocab 300 --out file/t.json",
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_is_refused_before_the_work(command, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "t.txt").write_text("a text")
    shutil.copytree(run, "other")
    fails(capsys, command.format(run=run).split(), "out = 'file", "choose another")
    assert (tmp_path / "file").read_text() == "mine"
