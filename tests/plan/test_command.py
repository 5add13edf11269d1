"""`nagjax plan` as a command, with a stand-in for the compiler."""

import json
import sys

import jax
import pytest

from nagjax.cli import main
from nagjax.files import write_json
from nagjax.plan.worker import stated
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig, from_dict, to_dict
from nagjax.runs.names import CONFIG
from nagjax.train.abstract_step import training_step
from tests import tiny

ANSWER = {
    "mesh": {"data": 1, "fsdp": 16, "tensor": 1},
    "parameters": 1000,
    "model_flops_per_token": 1e9,
    "memory": {"parameters": 10, "optimizer": 20, "batch": 1, "saved": 5, "peak": 100, "capacity": 2**34},
    "fits": True,
    "flops": 1e12,
    "moved": 1e10,
    "sent": 1e8,
    "collectives": {"all-gather": {"count": 3, "sent": 1e8}},
    "kernels": {},
    "seconds_to_lower": 1.0,
    "seconds_to_compile": 2.0,
    "peak_rss": 2**30,
    "jax": "0",
}
WORKER = """
import json, pathlib, sys
answer, order = json.loads({answer!r}), json.load(sys.stdin)
answer["order"] = order
pathlib.Path(sys.argv[1]).write_text(json.dumps(answer))
"""


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    """Both compilers are there, and answer at once."""
    monkeypatch.setattr("nagjax.plan.topology._installed", lambda module: True)
    code = WORKER.format(answer=json.dumps(ANSWER))
    monkeypatch.setattr("nagjax.plan.compile.WORKER", (sys.executable, "-c", code))


def fails(capsys, args, *words):
    assert main(["plan", *args]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and all(word in lines[0] for word in words), lines


def test_a_plan_is_printed_and_written(capsys, tmp_path):
    out = tmp_path / "new" / "plan.json"
    args = "--preset 1B --topology v5e:4x4 --dollars-per-hour 1.2 --vocab 1000 --remat dots".split()
    assert main(["plan", *args, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "v5e:4x4: 16 x TPU v5e" in text and "It fits" in text and "attention splash" in text
    result = json.loads(out.read_text())
    model = result["order"]["config"]["model"]
    assert (model["depth"], model["vocab"], model["remat"], model["dtype"]) == (80, 1000, "dots", "bfloat16")
    assert result["order"]["topology"] == "v5e:4x4" and result["dollars_per_hour"] == 1.2
    assert result["tokens_per_step"] == 16 * 8192


def test_a_place_for_the_result_is_looked_at_before_anything_is_compiled(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("nagjax.plan.compile.WORKER", ("false",))
    for out in (tmp_path, "/dev/null/plan.json"):
        fails(capsys, ["--preset", "1M", "--topology", "v5e:2x2", "--json", str(out)], "json = ")


def test_a_search_in_which_nothing_compiles_fails(capsys, tmp_path, monkeypatch):
    """What was tried is listed and written all the same."""
    monkeypatch.setattr("nagjax.plan.compile.WORKER", ("false",))
    args = f"--preset 1M --topology v5e:2x2 --search --tries 2 --json {tmp_path / 'plans.json'}".split()
    assert main(["plan", *args]) == 2
    said = capsys.readouterr()
    assert "search = " in said.err and "nothing could be compiled" in said.err
    assert len(json.loads((tmp_path / "plans.json").read_text())) == 2


def test_what_is_planned_is_told_with_its_own_batch(capsys):
    assert main("plan --preset 1M --topology v5e:2x2".split()) == 0
    assert "steps of 256 x 128 = 32,768 tokens, on v5e:2x2" in capsys.readouterr().out


@pytest.mark.parametrize("args", ["--mesh.fsdp 3", "--batch 3", "--context 3 --mesh.sequence 16"])
def test_options_are_looked_at_before_a_compiler_is_asked_for(capsys, monkeypatch, args):
    monkeypatch.setattr("nagjax.plan.topology._installed", lambda module: False)
    fails(capsys, f"--preset 150M --topology v5e-16 {args}".split(), args.split()[-1])
    fails(capsys, "--preset 150M --topology v5e-16".split(), "libtpu")


def test_a_bill_of_a_whole_training(capsys):
    args = "--preset 150M --topology v5e-16 --tokens 3e9 --dollars-per-hour 1.2 --mfu 0.25".split()
    assert main(["plan", *args]) == 0
    text = capsys.readouterr().out
    hours = 3e9 * 1e9 / (0.25 * 16 * 197e12) / 3600  # the stand-in's model has 1e9 FLOPs per token
    assert (
        "a training of 3,000,000,000 tokens" in text
        and f"{hours:.3g} hours, {16 * hours:.3g} chip-hours" in text
        and f"{16 * 1.2 * hours:,.2f} $" in text
    )


def counted(out, args):
    """What a compiler's process counts of the run that it is told to compile, with a copy on each of four devices."""
    words = [*args.split(), *"--topology v5e:2x2 --mesh.data 4 --json".split(), str(out)]
    assert main(["plan", *words]) == 0
    config = from_dict(RunConfig, json.loads(out.read_text())["order"]["config"])
    _, args, mesh = training_step(config, jax.devices()[:4])
    return config, stated(config, args, mesh)


def test_adapters_of_a_run(tmp_path, capsys):
    """The model is the run's, and what is trained, and has moments, is adapters alone."""
    base, rank = tiny.run_config(find_scheme("review")(), kv_heads=2), 2
    folder = tmp_path / "base"
    folder.mkdir()
    write_json(folder / CONFIG, to_dict(base))
    config, found = counted(tmp_path / "plan.json", f"--start {folder} --lora.rank {rank} --batch 8 --depth 99")
    size = base.model
    assert (config.model.depth, config.model.vocab, config.scheme.name) == (size.depth, size.vocab, "review")
    trained = rank * size.depth * (4 * 2 * size.width + 3 * (size.width + size.hidden))
    assert found["trained_parameters"] == trained < found["parameters"] / 2
    assert 0 <= found["memory"]["optimizer"] - 2 * 4 * trained < 64  # and the numbers of steps
    said = next(line for line in capsys.readouterr().out.splitlines() if "nagjax train" in line)
    want = {"--batch", "--start", "--lora.rank", "--mesh.data", "--dtype"}  # the run's own is float32
    assert {word for word in said.split() if word.startswith("--")} == want and f"--start {folder}" in said
    fails(capsys, f"--start {folder} --vocab 300 --topology v5e:2x2".split(), "vocab = 300", "that run's: leave it out")


def test_an_average_is_four_bytes_a_parameter(tmp_path):
    shape = "--depth 2 --width 32 --heads 2 --context 128 --batch 4 --ema"
    (_, without), (_, found) = (counted(tmp_path / "plan.json", f"{shape} {ema}") for ema in (0, 0.99))
    more = found["memory"]["optimizer"] - without["memory"]["optimizer"]
    assert more == 4 * found["parameters"] == found["memory"]["parameters"]


def test_a_search_writes_all_it_tried(capsys, tmp_path):
    out = tmp_path / "search.json"
    args = "--depth 4 --width 256 --context 1024 --topology v5e:2x2 --search --tries 3 --json".split()
    assert main(["plan", *args, str(out)]) == 0
    assert len(json.loads(out.read_text())) == 3
    text = capsys.readouterr().out
    assert "  1. " in text and "stopped after 3 tries" in text


def test_bad_input(capsys):
    fails(capsys, [], "topology", "v5e:2x2")
    fails(capsys, ["--topology", "v5e:4x5"], "topology = 'v5e:4x5'", "did you mean v5e:4x4?")
    fails(capsys, ["--topology", "h200x8", "--dollars-per-hour", "-1"], "dollars_per_hour", "above 0")
    fails(capsys, ["--topology", "h200x8", "--minutes", "0"], "minutes")
    fails(capsys, ["--topology", "h200x8", "--tokens", "0"], "tokens", "above 0")
    fails(capsys, ["--topology", "h200x8", "--mfu", "1.5"], "mfu", "at most 1")
    fails(capsys, ["--topology", "h200x8", "--preset", "9T"], "preset", "7B")
    fails(capsys, ["--topology", "h200x8", "--start", "nowhere"], "start = 'nowhere'", "no such folder")
    fails(capsys, ["--topology", "v5e:2x2", "--mesh.fsdp", "3"], "mesh")
    fails(capsys, ["--topology", "v5e:2x2", "--batch", "6"], "batch = 6", "try 4")
    fails(capsys, ["--topology", "v5e:2x4", "--batch", "3", "--search"], "batch = 3", "try 8")
    fails(capsys, ["--topology", "v5e:2x4", "--remat", "dots", "--search"], "remat = 'dots'", "leave it out")
    fails(capsys, ["--topology", "v5e:2x4", "--mesh.tensor", "2", "--search"], "mesh.tensor = 2", "leave it out")


def test_a_missing_compiler(capsys, monkeypatch):
    monkeypatch.setattr("nagjax.plan.topology._installed", lambda module: False)
    fails(capsys, ["--topology", "v5e:2x2"], "libtpu", "pip install -e '.[aot]'")
    fails(capsys, ["--topology", "h200x8"], "CUDA", "pip install -e '.[aot]'")


def test_a_compiler_that_dies(capsys, monkeypatch):
    dying = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    monkeypatch.setattr("nagjax.plan.compile.WORKER", dying)
    fails(capsys, ["--topology", "v5e:2x2"], "SIGABRT")
