"""The folders that are damaged, made once: a corpus, runs, a bundle, models of other formats, tokenizers, documents;
and the verbs that read each."""

import contextlib
import gzip
import io
import json
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zstandard

from nagjax import cli

TEXT = "the quick brown fox jumps over the lazy dog, 0123456789. "
TINY = ["--depth", "2", "--width", "16", "--context", "16", "--batch", "2", "--mesh.data", "1", "--dtype", "float32"]


READERS = {
    "metrics.jsonl": {"compare", "resume"},
    "info.json": {"compare", "train"},
    "sample.txt": {"compare"},
    "corpus.json": {"train", "eval"},
    "run.json": {"export", "open", "train"},
    "origin.json": {"export", "open"},
    "calibration.json": {"open"},
    "skipped.json": {"resume"},
    "tokenizer.json": {"export", "open", "import", "data prepare", "train"},
}


class Target(NamedTuple):
    """A folder, its files that are damaged (by pattern), and the verbs that read them: functions of the damaged folder
    and of an empty one for what they write, which return an exit code."""

    name: str
    folder: Path
    patterns: tuple[str, ...]
    verbs: dict[str, Callable[[Path, Path], int]]

    def readers(self, name: str) -> list[str]:
        """The verbs that read this file."""
        return sorted(READERS.get(name, self.verbs.keys()) & self.verbs.keys())

    def files(self) -> list[str]:
        found = {path for pattern in self.patterns for path in self.folder.glob(pattern) if path.is_file()}
        return sorted(str(path.relative_to(self.folder)) for path in found)


def command(*words: str) -> Callable[[Path, Path], int]:
    """A command line with FOLDER and OUT in it."""

    def run(folder: Path, out: Path) -> int:
        return cli.main([w.replace("FOLDER", str(folder)).replace("OUT", str(out / "made")) for w in words])

    return run


def function(read: Callable[[Path], object]) -> Callable[[Path, Path], int]:
    """Runs what several verbs begin with, with the command's own error handling."""

    def run(folder: Path, out: Path) -> int:
        kept, cli.run = cli.run, lambda args: read(folder)
        try:
            return cli.main([])
        finally:
            cli.run = kept

    return run


def open_model(folder: Path) -> None:
    """Opens the model as generate, eval, map and diagnose do."""
    from nagjax.interop.load import load

    run = load(folder)
    ids = [*run.beginning, *([] if run.tokenizer.name == "none" else run.tokenizer.encode("a fox"))]
    if run.tokenizer.name != "none":
        run.tokenizer.decode(ids)


def resume(folder: Path) -> None:
    """Reads what train also reads if the run is not finished."""
    from nagjax.runs.metrics import JsonLines
    from nagjax.runs.names import METRICS
    from nagjax.train.batches import Skipped

    Skipped(folder, fresh=False)
    JsonLines(folder / METRICS, 2).close()


def open_with_corpus(corpus: Path) -> Callable[[Path], None]:
    """As eval does: is it the corpus that the run was trained on?"""

    def read(folder: Path) -> None:
        from nagjax.data import DataConfig, open_dataset
        from nagjax.runs.folder import read_config
        from nagjax.runs.identity import check_corpus

        read_config(folder)
        check_corpus(folder, open_dataset(DataConfig(path=str(corpus)), split="validation"))

    return read


def open_corpus(folder: Path) -> None:
    """As train and eval do."""
    from nagjax.data import DataConfig, batches, open_dataset

    for split in ("train", "validation"):
        corpus = open_dataset(DataConfig(path=str(folder)), split=split)
        assert corpus.byte_count >= 0 and corpus.bytes_per_token().size
        next(iter(batches(corpus, batch=2, context=16)))


def open_questions(folder: Path) -> None:
    """As train and eval do."""
    from nagjax.data.tokenizer import ByteTokenizer
    from nagjax.train.tasks import open_tasks

    assert open_tasks([str(path) for path in folder.glob("*.jsonl")], ByteTokenizer(), 16).pairs


def quietly(run: Callable[[], int]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run()
    return code, err.getvalue()


def nagjax(*words: object) -> None:
    code, said = quietly(lambda: cli.main([str(word) for word in words]))
    assert code == 0, said


def build(folder: Path, trained: bool) -> list[Target]:
    """`trained`: with a run that was really trained, which compiles for some seconds."""
    text, documents = folder / "text", folder / "documents"
    text.mkdir(parents=True)
    for i in range(12):
        (text / f"{i}.txt").write_text(f"document {i}: " + TEXT * (2 + i % 4))
    tokenizer, corpus = folder / "tokenizer" / "tokenizer.json", folder / "corpus"
    tokenizer.parent.mkdir()
    nagjax("tokenizer", "train", text, "--out", tokenizer, "--vocab", 300)
    nagjax("data", "prepare", text, "--out", corpus, "--validation", 0.3, "--tokenizer", tokenizer)
    _documents(documents)
    (folder / "tasks").mkdir()
    question = {"context": "the quick", "choices": [" fox", " é"], "answer": 0}
    (folder / "tasks" / "fox.jsonl").write_text((json.dumps(question, ensure_ascii=False) + "\n") * 3)
    shutil.copytree(documents, folder / "stopped" / "input")
    with contextlib.suppress(Stop):
        _stopped(folder / "stopped", documents=20)
    model = _model(folder, corpus)
    nagjax("import", model, "--out", folder / "imported")
    _log(folder / "imported", corpus)
    shutil.copytree(folder / "imported", folder / "other")
    nagjax("export", folder / "imported", "--out", folder / "bundle", "--format", "bundle")
    from nagjax.interop.exporting import export

    export(folder / "imported", folder / "shards", shard_bytes=20_000)
    other = str(folder / "other")
    run_verbs = {
        "eval": function(open_with_corpus(corpus)),
        "info": command("info", "FOLDER"),
        "export": command("export", "FOLDER", "--out", "OUT"),
        "open": function(open_model),
        "compare": command("compare", "FOLDER", other, "--out", "OUT"),
    }
    imports = {"import": command("import", "FOLDER", "--out", "OUT"), "open": function(open_model)}
    run_files = ("*.json", "*.jsonl", "sample.txt", "checkpoints/*/manifest.json", "checkpoints/*/**/*")
    prepares = command("data", "prepare", "FOLDER", "--out", "OUT", "--validation", "0.3", "--longest", "100000")
    with_tokenizer = ("data", "prepare", str(text), "--out", "OUT", "--tokenizer", "FOLDER/tokenizer.json")
    targets = [
        Target("run", folder / "imported", run_files, run_verbs),
        Target("model", model, ("*.json", "*.safetensors"), imports),
        Target("model in shards", folder / "shards", ("*.json", "*.safetensors"), imports),
        Target("bundle", folder / "bundle", ("*.json", "*.safetensors"), imports),
        Target("corpus", corpus, ("*",), {"train": function(open_corpus)}),
        Target("tasks", folder / "tasks", ("*",), {"train": function(open_questions)}),
        Target("tokenizer", tokenizer.parent, ("*.json",), {"data prepare": command(*with_tokenizer)}),
        Target(
            "documents",
            documents,
            ("*",),
            {
                "data prepare": prepares,
                "tokenizer train": command("tokenizer", "train", "FOLDER", "--out", "OUT", "--vocab", "260"),
            },
        ),
        Target(
            "unfinished corpus", folder / "stopped", ("corpus/progress.json",), {"data prepare": function(_stopped)}
        ),
    ]
    if trained:
        run = folder / "trained"
        words = ["train", *TINY, "--steps", "4", "--eval-every", "2", "--save-every", "2", "--eval-batches", "1"]
        words += ["--scheme", "nag", "--data.path", str(corpus)]
        nagjax(*words, "--out", run)
        (run / "skipped.json").write_text(json.dumps({"batches": [1]}))
        (run / "calibration.json").write_text(json.dumps({"rate": 0.25, "threshold": 0.1}))
        files = ("*.json", "*.jsonl", "checkpoints/*/manifest.json", "checkpoints/*/_*", "checkpoints/*/*.json")
        verbs = {"train": command(*words, "--out", "FOLDER"), "open": function(open_model), "resume": function(resume)}
        targets.append(Target("trained run", run, files, verbs))
    return targets


def _model(folder: Path, corpus: Path) -> Path:
    """A folder as transformers writes it, of a llama that was never trained."""
    import jax

    from nagjax.data.tokenizer import load_tokenizer
    from nagjax.interop.exporting import export
    from nagjax.model.config import ModelConfig
    from nagjax.residual.schemes.plain import Plain
    from nagjax.runs.config import MeshConfig, RunConfig
    from nagjax.runs.opening import OpenRun
    from nagjax.train.distributed.mesh import make_mesh
    from nagjax.train.state import Blueprint

    tokenizer = load_tokenizer(str(corpus / "tokenizer.json"))
    shape = ModelConfig(depth=2, width=16, heads=2, context=16, vocab=tokenizer.vocab_size, qk_norm=False)
    blueprint = Blueprint.of(RunConfig(Plain(), shape), make_mesh(MeshConfig(data=1), jax.local_devices()[:1]))
    run = OpenRun(folder, blueprint, 0, blueprint.init(0).params, {}, tokenizer)
    export(run, folder / "model")
    return folder / "model"


def _log(run: Path, corpus: Path) -> None:
    """The log that training would have left in an imported run."""
    lines = []
    for step in (1, 2, 3, 4):
        numbers = {"step": step, "tokens": 32 * step, "loss": 5.0 - step, "bits_per_byte": 2.0}
        timed = {"grad_norm": 1.0, "lr": 0.001, "tokens_per_second": 100.0, "step_seconds": 0.5, "mfu": None}
        lines += [{"kind": "train", **numbers, **timed}, {"kind": "eval", **numbers}]
        widths = {"log_norm": 5, "turn": 4, "ratio": 4, "gate": 4, "closed": 4}
        lines.append({"kind": "tasks", "step": step, "tokens": 32 * step, "fox/acc": 0.5})
        lines.append({"kind": "depth", "step": step} | {name: [0.1] * width for name, width in widths.items()})
    lines.append({"kind": "event", "step": 2, "message": "resumed"})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    from nagjax.data import DataConfig, open_dataset
    from nagjax.runs.identity import corpus_identity

    (run / "corpus.json").write_text(json.dumps(corpus_identity(open_dataset(DataConfig(path=str(corpus))))))
    (run / "sample.txt").write_text("a sample")


def _documents(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    rows = [f"row {i}: " + TEXT for i in range(6)]
    plain = "".join(json.dumps({"text": row, "id": i, "meta": {"a": [1.5]}}) + "\n" for i, row in enumerate(rows))
    (folder / "plain.jsonl").write_text(plain)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(plain.encode()))
    (folder / "b.jsonl.xz").write_bytes(lzma.compress(plain.encode()))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(plain.encode()))
    (folder / "d.txt.gz").write_bytes(gzip.compress(TEXT.encode() * 9))
    (folder / "e.md").write_text(TEXT)
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), folder / "f.parquet")


class Stop(Exception):
    """Ends a preparation in the middle."""


def _stopped(folder: Path, documents: int | None = None) -> None:
    """A preparation that stops after this many documents, or runs to its end."""
    from nagjax.data.preparation import prepare

    def stop(done: int, tokens: int) -> None:
        if done == documents:
            raise Stop

    prepare([str(folder / "input")], folder / "corpus", validation=0.3, shard_tokens=400, progress=stop)
