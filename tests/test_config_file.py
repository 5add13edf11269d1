"""Options in a file mean the same as on the command line, and anything else is refused."""

import dataclasses
import json

import pytest

import nagjax.train.loop
from nagjax.cli import main
from nagjax.config_file import LARGEST_FILE, config_text, is_config_file, overridden, read_config_file
from nagjax.declared import scheme_names
from nagjax.errors import UserError
from nagjax.options import options_of_run, read_options, run_options
from nagjax.runs.config import to_dict
from nagjax.runs.names import ORIGIN, PRUNED


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.yaml"

    def write(text: str):
        path.write_text(text)
        return path

    return write


GIVEN = {"depth": 12, "lr": 1e-5, "mod.rate": (0.5, 0.25), "data.path": "über/corpus: a", "mesh.fsdp": 2, "tied": True}


def test_a_file_says_what_the_command_line_says(file):
    text = "depth: 12\nlr: 1e-5\nmod: {rate: [0.5, 0.25]}\ndata: 'über/corpus: a'\nmesh:\n  fsdp: 2\ntied: true\n"
    assert read_options(read_config_file(file(text))) == read_options(GIVEN)
    nested = text + "scheme: {name: review, rank: 4}\n"
    options = read_options(read_config_file(file(nested)))
    assert (options.name, options.own) == ("review", {"rank": 4})


@pytest.mark.parametrize("scheme", ["nag", "review", "plain"])
def test_what_is_printed_is_read_again(scheme, file):
    given = GIVEN | {"scheme": scheme}
    options = read_options(given)
    assert read_options(read_config_file(file(config_text(options, given.keys())))) == options
    every = {o.name for o in run_options(scheme)}
    text = config_text(options_of_run(read_options(given).config())[0], every)
    assert "# depth" not in text and text.count("\n") > len(every)
    assert read_options(read_config_file(file(text))).config() == options.config()


def test_comments_are_the_defaults(file):
    text = config_text(read_options({}), set())
    assert read_config_file(file(text)) == {"scheme": "nag"}
    shown = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ") and ": " in line][1:]
    assert read_options(read_config_file(file("\n".join(shown)))).config() == read_options({}).config()


def test_schemes_have_no_option_called_name():
    """It would be confused with the scheme's name."""
    assert not [s for s in scheme_names() if "scheme.name" in {o.name for o in run_options(s)}]


def test_the_command_replaces_the_file(file):
    written = {"depth": 12, "width": 32, "lr": 0.1, "seed": 3}
    assert overridden(written, {"lr": 0.2, "steps": 7}) == written | {"lr": 0.2, "steps": 7}
    options = read_options(overridden(written, {"preset": "1M", "width": 128}))
    assert (options.model.depth, options.model.width, options.train.seed) == (24, 128, 3)


def test_train_takes_a_file(file, monkeypatch, capsys):
    """Options of the command override the file's; the run has the file's name; a scheme in the file has its options."""
    seen = []
    monkeypatch.setattr(nagjax.train.loop, "train", lambda config, folder, **_: seen.append((config, folder)))
    path = file("scheme: review\nscheme.rank: 4\nsteps: 5\nwidth: 32\n")
    assert main(["train", str(path), "--steps", "6", "--scheme.rank", "8"]) == 0
    ((config, folder),) = seen
    assert (config.scheme.name, config.scheme.rank, config.train.steps, config.model.width) == ("review", 8, 6, 32)
    assert str(folder) == "runs/mine"
    assert main(["train", str(path), "--out", "elsewhere", "--scheme", "plain"]) == 2
    assert "scheme.rank" in capsys.readouterr().err, "options of another scheme are not dropped in silence"


def test_config_prints_a_run(tmp_path, capsys, file):
    config = read_options(GIVEN | {"scheme": "review", "scheme.rank": 4}).config()
    model = dataclasses.replace(config.model, vocab=999)  # of the corpus, and no option
    (tmp_path / "config.json").write_text(json.dumps(to_dict(dataclasses.replace(config, model=model))))
    assert main(["config", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert read_options(read_config_file(file(printed))).config() == config
    assert main(["config", str(tmp_path), "--depth", "3"]) == 2


KINDS = {
    "all by default": {},
    "wide": {"width": 768},
    "gelu": {"width": 256, "mlp": "gelu", "positions": "learned"},
    "experts": {"width": 256, "moe.experts": 4},
    "own hidden": {"width": 256, "moe.experts": 4, "moe.hidden": 40, "hidden": 512},
    "a size of no experts": {"moe.hidden": 40},
    "grouped": {"width": 256, "kv_heads": 2},
    "own heads": {"width": 384, "heads": 8},
    "as many key heads as heads, which others would not fit": {"width": 768, "heads": 8, "kv_heads": 8},
    "odd width": {"width": 7, "block.head_width": 8},
}


@pytest.mark.parametrize("given", KINDS.values(), ids=KINDS)
def test_the_file_of_a_run_says_what_was_given(file, given):
    """It is the run's config again; what follows from the width, say, is not in it, and follows from another one."""
    config = read_options(given).config()
    written = read_config_file(file(config_text(*options_of_run(config))))
    assert read_options(written).config() == config
    assert written.keys() <= {"scheme", *given}
    for other in ({"width": 512}, {"mlp": "relu"}, {"preset": "20M"}, {"moe.experts": 8}):
        assert read_options(overridden(written, other)).model == read_options(overridden(given, other)).model


def test_config_prints_a_file_with_more_options(file, capsys):
    assert main(["config", str(file("depth: 3\n")), "--width", "32"]) == 0
    printed = read_config_file(file(capsys.readouterr().out))
    assert printed == {"scheme": "nag", "depth": 3, "width": 32}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("data: corpus", {"data.path": "corpus"}),
        ("data: {path: corpus, seed: 3}", {"data.path": "corpus", "data.seed": 3}),
        ("scheme: {name: review, rank: 4}", {"scheme": "review", "scheme.rank": 4}),
        ("scheme.name: review", {"scheme": "review"}),
        ("preset: 1M", {"depth": 24, "width": 64, "context": 128}),
        ("mod: {rate: 0.5}", {"mod.rate": [0.5]}),
    ],
)
def test_config_prints_what_a_file_says_in_short(file, capsys, text, shown):
    path = file(text)
    assert main(["config", str(path)]) == 0
    printed = read_config_file(file(capsys.readouterr().out))
    assert printed == {"scheme": "nag"} | shown
    assert read_options(printed) == read_options(read_config_file(file(text)))


def test_the_command_replaces_what_a_file_says_in_short(file):
    assert overridden(read_config_file(file("data: a")), {"data.path": "b"}) == {"data.path": "b"}


def test_a_path_of_other_bytes_is_printed_and_read_again(file, capsys):
    path = b"caf\xe9".decode(errors="surrogateescape")
    assert main(["config", "--data.path", path]) == 0
    assert read_config_file(file(capsys.readouterr().out))["data.path"] == path


@pytest.mark.parametrize("mark", "\x7f\x80\x85\xa0\u2028\u2029\ufeff\ufffe\uffff\n\t\x00\U0001f600")
def test_every_character_is_printed_and_read_again(mark, file):
    options = read_options({"data.path": f"a{mark}b {mark}"})
    assert read_config_file(file(config_text(options, {"data.path"})))["data.path"] == f"a{mark}b {mark}"


def test_an_imported_run_is_no_file_of_options(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(to_dict(read_options(GIVEN).config())))
    (tmp_path / ORIGIN).write_text(json.dumps({"tokenizer_vocab": 2048, "end_of_text": 0}))
    assert main(["config", str(tmp_path)]) == 2
    assert "was imported" in (told := capsys.readouterr().err) and "--start" in told
    tuned = dataclasses.replace(read_options(GIVEN).config(), start="imported")  # which brought its origin.json
    (tmp_path / "config.json").write_text(json.dumps(to_dict(tuned)))
    assert main(["config", str(tmp_path)]) == 0
    assert 'start: "imported"' in capsys.readouterr().out
    (tmp_path / PRUNED).write_text("{}")
    assert main(["config", str(tmp_path)]) == 2 and "was pruned" in capsys.readouterr().err


def test_a_scheme_that_another_run_brings_is_not_told(file):
    options = read_options({"start": "runs/plain", "lr": 1e-3})
    assert "scheme" not in read_config_file(file(config_text(options, {"start", "lr"})))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dpeth: 3", ["dpeth", "'depth'"]),
        ("mod: {rat: 0.5}", ["mod.rat"]),
        ("vocab: 300", ["vocab", "known"]),
        ("mod: null", ["mod"]),
        ("scheme: nga", ["nga", "'nag'"]),
        ("scheme: [nag]", ["scheme"]),
        ("preset: 60", ["preset = 60", "text"]),
        ("preset: [60M]", ["preset", "text"]),
        ("start: true", ["start = True", "text"]),
        ("lr: 1" + "0" * 400, ["lr", "number"]),
        ("lr: 1" + "0" * 5000, ["mine.yaml", "digits"]),
        ("depth: three", ["depth", "three"]),
        ("depth: 3.0", ["depth", "whole number"]),
        ("tied: yes", ["tied", "true or false"]),
        ("lr: .nan", ["lr"]),
        ("seed: 0x10", ["seed"]),
        ("seed: 1_000", ["seed"]),
        ("log: 2026-01-01", ["log"]),
        ("data: {path: 3}", ["data.path"]),
        ("data: 3", ["data.path"]),
        ("data: null", ["data.path"]),
        ("data: [a, b]", ["data.path"]),
        ("data: a\ndata.path: b", ["data.path", "twice"]),
        ("depth: 3\ndepth: 4", ["line 2", "depth", "twice"]),
        ("mesh: {fsdp: 2}\nmesh.fsdp: 2", ["mesh.fsdp", "twice"]),
        ("scheme: nag\nscheme.name: nag", ["scheme", "twice"]),
        ("a: &x 3\nb: *x", ["line 2", "alias"]),
        ("depth: !!python/object/apply:os.getcwd []", ["line 1", "python/object"]),
        ("depth: !!int 3", ["line 1", "a tag"]),
        ("depth: !!bool x", ["line 1", "a tag"]),
        ("<<: {depth: 3}", ["<<"]),
        ("3: 4", ["line 1", "3"]),
        ("[a]: 4", ["line 1"]),
        ("- depth", ["list"]),
        ("depth", ["str"]),
        ("depth: 3\n---\ndepth: 4", ["document"]),
        ("depth: {", ["line"]),
        ("depth: 3\n\tx: 4", ["line 2"]),
        ("a: " + "[" * 30_000, ["deep"]),
        ("depth: \x00", ["mine.yaml"]),
        ("# " + "x" * LARGEST_FILE, ["1 MiB"]),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, str) else "",
)
def test_what_is_refused_in_one_line(file, capsys, text, words):
    assert main(["train", str(file(text))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("nagjax: error: ") and error.count("\n") == 1 and "Traceback" not in error
    for word in words:
        assert word in error


def test_files_that_are_not_there_or_no_text(tmp_path, capsys):
    assert main(["train", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="UTF-8"):
        read_config_file(tmp_path / "x.yaml")
    assert read_config_file(_empty(tmp_path / "empty.yaml")) == {}


def _empty(path):
    path.write_text("")
    return path


def test_which_arguments_are_files():
    assert is_config_file("a/b.yaml") and is_config_file("B.YML")
    assert not is_config_file("runs/a") and not is_config_file("--out=x.yaml")
