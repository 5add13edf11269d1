"""nagjax eval, generate, info and compare: what reads runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from nagjax.commands.options import parse, parse_run
from nagjax.errors import UserError

RunFolder = Annotated[Path, tyro.conf.Positional]


def evaluate(args: Sequence[str]) -> None:
    def command(
        run: RunFolder,
        data: str | None = None,
        batches: int | None = None,
        as_json: bool = False,
        tasks: str | None = None,
        task_folder: Path | None = None,
        fewshot: int | None = None,
        limit: int | None = None,
    ) -> None:
        """Validation loss of a run, and what its depth does; or, with --tasks, benchmarks of lm-evaluation-harness.

        Args:
            run: a run folder.
            data: another corpus with the same tokenizer; the run's own by default.
            batches: read only so many batches; all by default.
            as_json: print one JSON object.
            tasks: of the harness, separated by commas; the report goes to tasks.json in the run's folder.
            task_folder: with tasks of your own.
            fewshot: examples in each prompt; the task's own number by default.
            limit: ask only so many questions of each task.
        """
        if tasks is not None:
            _benchmarks(run, tasks, task_folder, fewshot, limit, as_json)
            return
        from nagjax.generate.evaluate import evaluate as evaluate_run

        scores = evaluate_run(run, data=data, batches=batches)
        if as_json:
            print(json.dumps(scores))
            return
        for name, value in scores.items():
            if isinstance(value, int | float):
                print(f"{name:15} {value:.6g}" if isinstance(value, float) else f"{name:15} {value}")

    parse(command, args, "eval")


def _benchmarks(run: Path, tasks: str, folder: Path | None, fewshot: int | None, limit: int | None, as_json: bool):
    from nagjax.generate.load import open_run
    from nagjax.interop.lm_eval import evaluate_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    scores = evaluate_tasks(open_run(run), names, task_folder=folder, fewshot=fewshot, limit=limit)
    if as_json:
        print(json.dumps(scores))
        return
    for task, metrics in scores.items():
        for metric, value in metrics.items():
            print(f"{task:24} {metric:24} {value:.6g}")


def generate(args: Sequence[str]) -> None:
    def command(
        run: RunFolder,
        prompt: tuple[str, ...] = ("",),
        tokens: int = 64,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
        speed: bool = False,
    ) -> None:
        """Continue prompts, all of them in one batch, with a key/value cache.

        Args:
            run: a run folder.
            prompt: one or more texts to continue.
            tokens: new tokens for each, at most; a document's end stops its row.
            temperature: 0 takes the likeliest token.
            top_p: sample from the smallest set of tokens that holds this probability.
            seed: of the samples.
            speed: also time it, with skipped sublayers and with all of them.
        """
        from nagjax.generate.load import open_run
        from nagjax.generate.sample import complete
        from nagjax.generate.speed import tokens_per_second

        opened = open_run(run)
        texts = complete(opened, list(prompt), tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
        for start, text in zip(prompt, texts, strict=True):
            print(f"{start}{text}", end="\n---\n" if len(prompt) > 1 else "\n")
        if speed:
            rates = tokens_per_second(opened, prompt, tokens)
            print("  ".join(f"{name}: {rate:.1f} tokens/s" for name, rate in rates.items()))

    parse(command, args, "generate")


def info(args: Sequence[str]) -> None:
    """`nagjax info RUN`, or `nagjax info --scheme lns --depth 96 ...` for a model that was never trained. With --kernels:
    which implementation every fused operation takes at the model's width on every platform, and why not another."""
    from rich.console import Console

    from nagjax.train.facts import describe, resolve

    kernels, args = "--kernels" in args, [arg for arg in args if arg != "--kernels"]
    if args and not args[0].startswith("-"):
        from nagjax.generate.load import read_config

        if args[1:]:
            raise UserError("info", " ".join(args[1:]), "a run has all its options already: give its folder alone")
        config = read_config(Path(args[0]))
    else:
        description = "Parameters by part, FLOPs and memory of a run (nagjax info RUN) or of any model. "
        description += "With --kernels: which kernels its operations run by, and why."
        config = resolve(parse_run(args, "info", description)[0])
    if kernels:
        from pallas_kernels.dispatch import table

        print(table(width=config.model.width, dtype=config.model.dtype.replace("auto", "bfloat16")))
        return
    Console().print(describe(config))


def compare(args: Sequence[str]) -> None:
    def command(runs: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path = Path("runs/compare")) -> None:
        """Two or more runs in one table, with loss curves and depth profiles.

        Args:
            runs: run folders.
            out: where report.html, report.md and the figures go.
        """
        from nagjax.analysis.compare import compare as compare_runs

        print(compare_runs(runs, out))

    parse(command, args, "compare")
