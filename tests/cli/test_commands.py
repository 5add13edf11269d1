"""The commands end to end on tiny models: the demo, and the commands that read the runs it leaves."""

import json
import shutil

import pytest

from nagjax.cli import main
from nagjax.interop.hub import SHIPPED
from nagjax.json_reader import parse_json
from nagjax.runs.lock import Held
from nagjax.runs.log import load_run
from nagjax.runs.names import IDENTITY
from tests.tolerance import assert_close, close_to


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    args = "--depth 2 --width 16 --context 32 --batch 8 --steps 8 --schemes plain nag".split()
    assert main(["demo", *args, "--out", str(out)]) == 0
    return out


def test_demo_leaves_a_self_contained_report(demo):
    page = (demo / "report.html").read_text()
    assert "data:image/png;base64," in page and 'src="http' not in page
    assert "NAG" in page and "plain pre-norm" in page
    assert (demo / "report.md").exists()
    for scheme in ("plain", "nag"):
        run = demo / f"{scheme}-d2-w16"
        kinds = [json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert kinds.count("train") == 8 and kinds.count("eval") == kinds.count("depth") == 5
        assert (run / "sample.txt").read_text().startswith("def ")


def test_demo_started_again_trains_nothing_twice(demo):
    before = (demo / "nag-d2-w16" / "metrics.jsonl").read_bytes()
    args = "--depth 2 --width 16 --context 32 --batch 8 --steps 8 --schemes plain nag --processes 1".split()
    assert main(["demo", *args, "--out", str(demo)]) == 0
    assert (demo / "nag-d2-w16" / "metrics.jsonl").read_bytes() == before


def test_demo_tells_once_which_text_is_not_there(tmp_path, capfd):
    none = tmp_path / "none"
    assert main(["demo", "--data", str(none), "--out", str(tmp_path / "demo"), "--processes", "2"]) == 2
    assert capfd.readouterr().err.count(f"data = '{none}': does not exist") == 1


def test_demo_fresh_in_one_process_trains_the_same_again(demo, tmp_path, capsys):
    out = tmp_path / "demo"
    shutil.copytree(demo, out)
    args = "--depth 2 --width 16 --context 32 --batch 8 --steps 8 --schemes nag --fresh --processes 1".split()
    assert main(["demo", *args, "--out", str(out)]) == 0
    assert "--fresh deletes" in capsys.readouterr().err
    ids = [(folder / "nag-d2-w16" / IDENTITY).read_text() for folder in (demo, out)]
    assert ids[0] != ids[1]
    lines = [(folder / "nag-d2-w16" / "metrics.jsonl").read_text().splitlines() for folder in (demo, out)]
    one, other = ([json.loads(line)["loss"] for line in own if '"train"' in line] for own in lines)
    assert_close(one, other, terms=64, chain=24)


def test_demo_fresh_clears_every_run_before_it_trains(demo, tmp_path, capsys, monkeypatch):
    out, found = tmp_path / "demo", []
    shutil.copytree(demo, out)

    def train(config, folder, **options):
        found.append((folder.name, config.train.steps, sorted(path.name for path in folder.glob("checkpoints/*"))))
        raise Held("out", str(folder), "is another's")

    monkeypatch.setattr("nagjax.train.loop.train", train)
    args = "--depth 2 --width 16 --context 32 --batch 8 --steps 4 --schemes plain nag --fresh --processes 1".split()
    assert main(["demo", *args, "--out", str(out)]) == 2  # and no run is left to report on
    assert "--fresh deletes" in capsys.readouterr().err
    assert found == [("plain-d2-w16", 4, []), ("nag-d2-w16", 4, [])]


def test_demo_fresh_deletes_nothing_if_it_cannot_train(demo, tmp_path, capsys):
    out = tmp_path / "demo"
    shutil.copytree(demo, out)
    args = "--depth 2 --width 16 --context 32 --batch 8 --steps 4 --schemes plain nag --fresh".split()
    assert main(["demo", *args, "--out", str(out), "--data", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
    assert [load_run(out / f"{scheme}-d2-w16").step for scheme in ("plain", "nag")] == [8, 8]


def test_eval_prints_the_same_loss_the_run_logged(demo, capsys):
    run = demo / "nag-d2-w16"
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in logged if line["kind"] == "eval"][-1]
    batches = json.loads((run / "config.json").read_text())["train"]["eval_batches"]
    capsys.readouterr()
    assert main(["eval", str(run), "--batches", str(batches), "--as-json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["loss"] == close_to(last["loss"], terms=64, chain=24)
    assert scores["bits_per_byte"] == close_to(last["bits_per_byte"], terms=64, chain=24)


@pytest.mark.parametrize("tasks", [[], ["--tasks", "fox.jsonl"]])
def test_eval_prints_json_of_what_is_not_finite_too(capsys, monkeypatch, tasks):
    scores = {"loss": float("nan"), "perplexity": float("inf"), "depth": {"turn": [0.5, float("nan")]}}
    monkeypatch.setattr("nagjax.interop.load.load", lambda *_, **__: None)
    monkeypatch.setattr("nagjax.generate.evaluate.evaluate", lambda *_, **__: scores)
    monkeypatch.setattr("nagjax.commands.eval._on_tasks", lambda *_: {"fox": scores})
    assert main(["eval", "run", "--as-json", *tasks]) == 0
    want = {"loss": None, "perplexity": None, "depth": {"turn": [0.5, None]}}
    assert parse_json(capsys.readouterr().out) == ({"fox": want} if tasks else want)


def test_generate_takes_a_batch_of_prompts_and_repeats_itself(demo, capsys):
    args = ["generate", str(demo / "nag-d2-w16"), "--prompt", "import ", "x", "--tokens", "8", "--temperature", "0"]
    outputs = []
    for _ in range(2):
        capsys.readouterr()
        assert main(args) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and outputs[0].startswith("import ") and outputs[0].count("---") == 2


def test_info_counts_every_parameter_once(demo, capsys):
    run = demo / "plain-d2-w16"
    facts = json.loads((run / "info.json").read_text())
    assert sum(facts["parameters_by_part"].values()) == facts["parameters"]
    capsys.readouterr()
    assert main(["info", str(run)]) == 0
    assert f"{facts['parameters']:,}" in capsys.readouterr().out
    assert main(["info", str(run), "--kernels"]) == 0
    table = capsys.readouterr().out
    assert "[16384, 16] " in table and "add_rms_norm            xla            mosaic_tpu     pallas_triton" in table


def test_info_and_compare_know_models_by_name(tmp_path, capsys):
    config = json.loads((SHIPPED / "nag-24" / "config.json").read_text())
    assert main(["info", "nag-24"]) == 0
    assert f"NAG: {config['nagjax']['config']['model']['depth']} blocks" in capsys.readouterr().out
    assert main(["compare", "nag-24", "plain-24", "--out", str(tmp_path)]) == 0
    assert "is ahead with" in capsys.readouterr().out


def test_compare_writes_a_report(demo, tmp_path, capsys):
    runs = [str(demo / f"{scheme}-d2-w16") for scheme in ("plain", "nag")]
    assert main(["compare", *runs, "--out", str(tmp_path / "both")]) == 0
    assert (tmp_path / "both" / "report.html").exists()


def test_tokenizer_and_prepare_lead_to_a_run(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a small text that says hello to number {i * i}\n" for i in range(3000)))
    assert main(["tokenizer", "train", str(text), "--out", str(tmp_path / "t.json"), "--vocab", "300"]) == 0
    corpus = str(tmp_path / "corpus")
    prepare = ["data", "prepare", str(text), "--out", corpus, "--tokenizer", str(tmp_path / "t.json")]
    assert main([*prepare, "--validation", "0.4"]) == 0
    tiny = "--scheme lns --depth 1 --width 16 --context 16 --batch 8 --steps 2 --eval-batches 1 --mesh.data 1".split()
    assert main(["train", *tiny, "--data.path", corpus, "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["vocab"] == 300
    shutil.rmtree(corpus)  # the run carries its tokenizer
    assert main(["generate", str(tmp_path / "run"), "--prompt", "line", "--tokens", "4"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train", "stopped; the same command goes on"),
        ("train --fresh", "stopped; the same command without --fresh goes on"),
        ("chat run", "stopped\n"),
    ],
)
def test_what_goes_on_says_so(monkeypatch, capsys, words, said):
    def stopped(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("nagjax.cli.run", stopped)
    assert main(words.split()) == 130 and capsys.readouterr().err.startswith(f"\n{said}")
