import base64
import errno
import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from nagjax.errors import UserError
from nagjax.report import report
from nagjax.report.compare import compare
from nagjax.report.plots import Plot
from nagjax.report.report import write_report
from nagjax.runs.log import load_run
from tests.run_folders import eval_line, final_lines, train_line, write_run

VOID = {"meta", "img", "br", "link"}
NASTY = '<script>alert("x")</script> & `ticks` ```\n# not a heading'
TITLE = "Depth & <width> *"
NOTE = "A note with <b>tags</b>."


class Checker(HTMLParser):
    """Every tag closed in order; links and tags collected."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.links, self.tags, self.text = [], [], [], ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    event = {"kind": "event", "step": 4, "message": "resumed <here>"}
    return [
        load_run(write_run(folder / "p", final_lines(1.81), scheme="plain", lr=0.016, sample=NASTY)),
        load_run(write_run(folder / "n", [*final_lines(1.79), event], scheme="nag", sample="def f(x):")),
    ]


@pytest.fixture
def no_figures(monkeypatch):
    """For tests that are not about figures: drawing them is most of the time."""
    monkeypatch.setattr(report, "draw_plots", lambda runs: [Plot("loss", "drawn", b"PNG")])


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    path = write_report(runs, tmp_path_factory.mktemp("report"), TITLE, [NOTE])
    assert path.name == "report.html"
    return path.parent


def test_the_page_stands_alone_and_escapes(written):
    page = (written / "report.html").read_text()
    checked = Checker(page)
    assert len(checked.links) == 6 and all(link.startswith("data:image/png;base64,") for link in checked.links)
    assert not re.search(r"https?://|@import|url\(", page)
    assert not {"script", "link", "b", "iframe"} & set(checked.tags)
    for text in (NASTY, NOTE, TITLE, "resumed <here>", "NAG is ahead"):
        assert text in checked.text
    assert "plain pre-norm 0.016 and NAG 0.008" in checked.text
    assert "nagjax compare" in checked.text and '"train_flops_per_token": 9210000.0' in checked.text
    assert "Not a like-for-like" not in checked.text


def test_the_figures_beside_are_the_ones_inside(written):
    inside = [base64.b64decode(link.split(",")[1]) for link in Checker((written / "report.html").read_text()).links]
    links = re.findall(r"!\[\w+\]\((.+?)\)", (written / "report.md").read_text())
    assert [(written / link).read_bytes() for link in links] == inside


def test_markdown_says_the_same(written):
    text = (written / "report.md").read_text()
    assert text.startswith("# Depth & \\<width\\> \\*\n")
    assert "````text\n" + NASTY + "\n````" in text  # a fence longer than the one in the sample
    assert "| depth (blocks) | 4 | 4 |" in text and "**1.7900**" in text
    assert text.count("```json") == 2


def test_the_same_runs_give_the_same_files_and_no_others(runs, written, tmp_path):
    write_report(runs, tmp_path, TITLE, [NOTE])
    files = sorted(str(p.relative_to(written)) for p in written.rglob("*") if p.is_file())
    figures = [f"figures/{name}.png" for name in ("gap", "gate", "growth", "growth_over_training", "loss", "turn")]
    assert files == [*figures, "report.html", "report.md"]
    assert all((written / f).read_bytes() == (tmp_path / f).read_bytes() for f in files)


def test_uneven_broken_and_bare_runs_are_reported(make_run, tmp_path):
    nan = float("nan")
    runs = [
        load_run(make_run("long", final_lines(1.9, steps=20), scheme="plain")),
        load_run(make_run("bare", [train_line(10, 1.7), eval_line(10, 1.7)], scheme="lns")),
        load_run(make_run("nan", [*final_lines(1.5), train_line(11, nan), eval_line(11, nan)], scheme="nag")),
    ]
    text = Checker(write_report(runs, tmp_path / "out", "t").read_text()).text
    assert "LayerNorm Scaling is ahead" in text
    assert "NAG ended without a finite score." in text
    assert "tokens trained: plain pre-norm 40,960, LayerNorm Scaling 20,480, NAG 22,528" in text
    assert "n/m" in text and "NaN" in text


def test_one_run_can_be_reported_and_none_cannot(runs, tmp_path, no_figures):
    assert "NAG reaches" in write_report(runs[1:], tmp_path, "t").read_text()
    with pytest.raises(UserError, match="at least one run"):
        write_report([], tmp_path, "t")


def test_a_folder_that_cannot_be_written_is_named(runs, tmp_path, no_figures):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match="cannot be written"):
        write_report(runs, tmp_path / "file", "t")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_full_disk_keeps_the_old_report(runs, tmp_path, no_figures, monkeypatch):
    path = write_report(runs, tmp_path, "old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("nagjax.files.os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_report(runs, tmp_path, "new")
    assert "<h1>old</h1>" in path.read_text()
    assert not list(tmp_path.rglob("*.partial"))


def said(paths, out) -> str:
    console = Console(file=io.StringIO(), width=100)
    assert compare(paths, out, console) == out / "report.html"
    return " ".join(console.file.getvalue().split())


def test_compare_prints_and_writes(runs, tmp_path, no_figures):
    text = said([run.path for run in runs], tmp_path / "out")
    assert "*1.7900" in text and "NAG is ahead" in text
    assert "like-for-like" not in text
    assert (tmp_path / "out" / "report.md").is_file() and (tmp_path / "out/figures/loss.png").is_file()


def test_compare_looks_at_its_folder_before_it_draws(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("nagjax.report.compare.build_report", lambda *_: pytest.fail("drawn"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="^out = .*is a file"):
        compare([run.path for run in runs], tmp_path / "file")


def test_figures_of_an_earlier_report_are_gone(runs, tmp_path, monkeypatch):
    def save(names):
        monkeypatch.setattr(report, "draw_plots", lambda _: [Plot(name, "drawn", b"PNG") for name in names])
        write_report(runs, tmp_path, TITLE)

    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "gap.png").write_bytes(b"somebody's")
    save(["loss"])
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"loss", "gap"}
    save(["gap", "map-1"])
    (tmp_path / "figures" / "mine.png").touch()
    save(["loss"])
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"loss", "mine"}


@pytest.mark.parametrize("file, command", [("prune.json", "prune"), ("average.json", "average")])
def test_what_has_not_trained_is_not_told_to_wait(runs, make_run, tmp_path, file, command):
    made = make_run("made", [])
    (made / file).write_text("{}")
    with pytest.raises(UserError, match=f"was made by nagjax {command} .*nagjax eval RUN"):
        compare([runs[0].path, made], tmp_path / "out")


def test_compare_names_what_differs(runs, make_run, tmp_path, no_figures):
    other = make_run("o", final_lines(1.7, steps=5), scheme="lns", seed=7, data={"corpus": "books"})
    text = said([runs[0].path, other], tmp_path / "out")
    assert "Not a like-for-like comparison" in text
    for field in ("data.corpus", "data.tokenizer", "tokens trained", "train.seed"):
        assert f"{field}: plain pre-norm" in text
    assert "model.depth" not in text
    assert "Besides scheme and learning rate, the runs differ in:" in (tmp_path / "out" / "report.md").read_text()


def test_compare_refuses_fewer_than_two(runs, tmp_path, no_figures):
    with pytest.raises(UserError, match="two or more"):
        compare([runs[0].path], tmp_path / "out")
    with pytest.raises(UserError, match="once"):
        compare([runs[0].path, runs[0].path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_dollar_signs_is_drawn(make_run, tmp_path):
    text = said([make_run(name, final_lines(1.8)) for name in ("lr$$a", "$\\frac$")], tmp_path / "out")
    assert "lr$$a" in text and (tmp_path / "out" / "figures" / "loss.png").is_file()


def test_the_next_command_is_about_the_best_run_by_loss_where_there_are_no_bytes(make_run):
    lines = [eval_line(10, loss) | {"bits_per_byte": None} for loss in (2.1, 2.3, 2.0, 2.2)]
    runs = [load_run(make_run(name, [line])) for name, line in zip("abcd", lines, strict=True)]
    assert report._commands(runs)[1] == f"nagjax eval {runs[2].path}"


def test_each_cpu_has_its_line(make_run):
    runs = [load_run(make_run(name, final_lines(1.8), scheme=name)) for name in ("plain", "nag")]
    assert len(report._origin([("a", runs[0]), ("b", runs[1])])) == 1
    runs[1].info["cpu"] = "AMD EPYC"
    told = report._origin([("a", runs[0]), ("b", runs[1])])
    assert told[0].startswith("a: 1 x cpu; jax") and told[1].startswith("b: 1 x cpu (AMD EPYC); jax")
    runs[1].info["device"] = runs[0].info["device"] = "NVIDIA H200"  # the host of a GPU is not what trained
    assert len(report._origin([("a", runs[0]), ("b", runs[1])])) == 1
