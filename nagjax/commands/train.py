"""nagjax train, demo and bench: what runs steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from nagjax.commands.options import parse, parse_run
from nagjax.errors import UserError


def train(args: Sequence[str]) -> None:
    import jax

    from nagjax.train.hosts import HostsConfig, connect
    from nagjax.train.loop import train as train_run

    description = (
        "Train a Transformer under one residual scheme, or go on training it: the same command resumes.\n\n"
        "--scheme NAME (default nag) chooses the scheme and its own --scheme.* options; "
        "--preset 1M|4M|20M|60M|150M|350M|1B sets depth, width and context; "
        "--resume previous passes over a damaged newest checkpoint; "
        "--start RUN begins with the model, scheme and parameters of another run, an imported one say."
    )
    extra = [("out", Path | None, None), ("fresh", bool, False), ("resume", Literal["latest", "previous"], "latest")]
    extra += [("hosts", HostsConfig, HostsConfig()), ("start", Path | None, None)]
    config, given = parse_run(args, "train", description, extra)
    connect(given.hosts)
    _settle()
    model = config.model
    if given.start is not None and given.out is None:
        raise UserError("out", None, "give a folder for the run that starts from another one")
    folder = given.out or Path("runs") / f"{config.scheme.name}-d{model.depth}-w{model.width}"
    train_run(config, folder, fresh=given.fresh, skip_damaged=given.resume == "previous")
    if jax.process_index() == 0:
        print(f"finished: {folder}\n  nagjax eval {folder}\n  nagjax generate {folder} --prompt 'def '")


def demo(args: Sequence[str]) -> None:
    from nagjax.demo import Demo, run_demo

    _settle()
    run_demo(parse(Demo, args, "demo"))


def bench(args: Sequence[str]) -> None:
    from nagjax.bench import BenchCompile, BenchStep, bench_compile, bench_step
    from nagjax.bench_mod import BenchMod, bench_mod

    known = {"step": (BenchStep, bench_step), "compile": (BenchCompile, bench_compile), "mod": (BenchMod, bench_mod)}
    what = args[0] if args else ""
    if what in ("-h", "--help"):
        print("usage: nagjax bench step | compile | mod [OPTIONS]; each has a --help of its own")
        return
    if what not in known:
        raise UserError("bench", what, f"known benchmarks: {', '.join(known)}")
    _settle()
    options, measure = known[what]
    measure(parse(options, args[1:], f"bench {what}"))


def _settle() -> None:
    """What a process that is going to train does first, on a CPU."""
    import jax

    from nagjax.memory import keep_freed_memory

    if jax.default_backend() == "cpu":
        keep_freed_memory()
