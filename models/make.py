"""The models of this folder, from nothing: nagjax's own commands, then each model's card and its log.

`make models` trains them all again, and goes on where it was stopped: on 2 CPU cores, a thread for each of two models
at a time, five hours. `MODELS="plain nag"` chooses schemes. The runs stay in models/runs, which git ignores.
"""

import argparse
import json
import os
import platform
import queue
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nagjax.residual import find_scheme

HERE = Path(__file__).resolve().parent
RUNS = HERE / "runs"
# Peak learning rates: the best of each scheme's at 16 blocks and a twentieth of the tokens (tokens_and_depth, arms; of
# nag_harmonic: equal_flops).
RATES = {"plain": "4e-3", "lns": "4e-3", "review": "4e-3", "nag": "8e-3", "nag_harmonic": "8e-3"}
TOKENIZER = "nagjax tokenizer train stdlib --vocab 2048 --out tokenizer.json"
TRAIN = (
    "nagjax train --scheme {scheme} --lr {lr} --depth 24 --width 64 --context 256 --batch 4 --steps 20000 "
    "--data.tokenizer tokenizer.json --eval-every 1000 --eval-batches 32 --save-every 250 --out {scheme}-24"
)
EVAL = "nagjax eval {scheme}-24 --as-json"
EXPORT = "nagjax export {scheme}-24 --format bundle --dtype bfloat16 --out ../{scheme}-24"
THINNED = 100  # of the records of single steps, the log here keeps one in so many

CARD = """# {scheme}-24: {title}, 24 blocks x 64

```python
import nagjax

run = nagjax.load("{scheme}-24")
print(nagjax.complete(run, "def read(self"))
```

This model is for examination, not for use: it has read the sources of the Python standard library and knows nothing
else.

| | |
|---|---|
| parameters | {info[parameters]:,}, in bfloat16 here |
| training text | `stdlib`: the library of Python {python} without tests, codecs and help texts; BPE of 2,048 tokens |
| tokens | {tokens:.1f}M, {per_parameter:.0f} for each parameter, {epochs:.1f} times the text |
| training | {steps:,} steps of {batch} x {context}; AdamW, cosine, peak learning rate {lr}, seed 0 |
| validation loss | {loss:.4f} nats per token, {bits:.4f} bits per byte, on the {targets:,} held-out tokens |
| next token right | {accuracy:.1%} |
| trained on | {info[cpu]}, one thread; nagjax at commit {info[commit]}, jax {info[versions][jax]}, {date} |

These commands, run in `models/runs`, made the weights. If the second one is interrupted, the same command continues it;
the last one needs `models/{scheme}-24` to be absent or empty. `make models MODELS={scheme}` runs them all, replaces the
folder, and adds this card and the log:

```sh
{commands}
```

[metrics.jsonl](metrics.jsonl), which `nagjax.log(run)` reads, has every evaluation with its depth profile, and one in
{thinned} of the training steps.
"""


CARD_FACTS = (r"^# [\w-]+: ([^,]+),", r"validation loss \| ([^,]+) nats", r"next token right \| (\S+)")
INDEX = """# Models to look into

These are small models that have read the same text, each with another residual scheme, long enough to have learned
something. If nagjax runs from a clone, `nagjax.load` and some commands know them by name: `generate`, `chat`, `eval`,
`map`, `diagnose`, `compare`, `info` and `import`. The other commands need a run folder, which `import` makes:

```sh
nagjax generate nag-24 --prompt 'def read(self'
nagjax diagnose nag-24                   # the page is in nag-24-report, unless --out names a folder
nagjax import nag-24 --out runs/mine     # a run's folder of one's own, to calibrate, prune or train further
```

| model | scheme | validation loss, nats per token | next token right |
|---|---|---|---|
{rows}

The losses are those of the whole held-out text; pages that measure a part of it give other values. Each model has one
seed, so a difference between two of them is an example, not a result ([results](../experiments/README.md)).
`make models` trains them again, with the commands on their cards: about two hours each on one CPU core.
"""


def commands(scheme: str) -> list[str]:
    return [TOKENIZER, *(c.format(scheme=scheme, lr=RATES[scheme]) for c in (TRAIN, EVAL, EXPORT))]


def run(command: str, cpu: int | None = None) -> str:
    """Standard output of one of nagjax's commands, in the folder of the runs, on the given CPU alone."""
    program, *words = shlex.split(command)
    pin = (lambda: os.sched_setaffinity(0, {cpu})) if cpu is not None else None
    call = [Path(sys.executable).with_name(program), *words]
    return subprocess.run(call, cwd=RUNS, check=True, stdout=subprocess.PIPE, text=True, preexec_fn=pin).stdout


def make(scheme: str, cpu: int | None) -> None:
    _, train, evaluate, export = commands(scheme)
    run(train, cpu)
    found = json.loads(run(evaluate, cpu))
    kept, bundle = RUNS / f"{scheme}-24", HERE / f"{scheme}-24"
    shutil.rmtree(bundle, ignore_errors=True)  # the one before: an export writes into an empty folder
    run(export, cpu)
    shutil.copyfile(kept / "info.json", bundle / "info.json")
    write_log(kept / "metrics.jsonl", bundle / "metrics.jsonl")
    write_card(scheme, found)


def write_log(metrics: Path, log: Path) -> None:
    kept = [
        line
        for line in metrics.read_text().splitlines(keepends=True)
        if (record := json.loads(line))["kind"] != "train" or record["step"] % THINNED == 0
    ]
    log.write_text("".join(kept))


def write_card(scheme: str, found: dict) -> None:
    folder = RUNS / f"{scheme}-24"
    config, info = (json.loads((folder / name).read_text()) for name in ("config.json", "info.json"))
    model, train = config["model"], config["train"]
    tokens = train["steps"] * train["batch"] * model["context"]
    card = CARD.format(
        scheme=scheme,
        title=find_scheme(scheme).title,
        python=platform.python_version(),
        info=info,
        steps=train["steps"],
        batch=train["batch"],
        context=model["context"],
        loss=found["loss"],
        bits=found["bits_per_byte"],
        targets=found["tokens"],
        accuracy=found["accuracy"],
        tokens=tokens / 1e6,
        per_parameter=tokens / info["parameters"],
        epochs=tokens / json.loads((folder / "corpus.json").read_text())["tokens"],
        lr=RATES[scheme],
        date=info["date"][:10],
        commands="\n".join(commands(scheme)),
        thinned=THINNED,
    )
    (HERE / f"{scheme}-24" / "README.md").write_text(card)


def index() -> str:
    """README.md of this folder: the cards' losses side by side."""
    rows = []
    for card in sorted(HERE.glob("*/README.md")):
        told = card.read_text()
        title, loss, right = (re.search(pattern, told)[1] for pattern in CARD_FACTS)
        rows.append(f"| [{card.parent.name}]({card.parent.name}/README.md) | {title} | {loss} | {right} |")
    return INDEX.format(rows="\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemes", nargs="*", metavar="SCHEME", help=f"{', '.join(RATES)}; all by default")
    schemes = parser.parse_args().schemes or list(RATES)
    if unknown := set(schemes) - set(RATES):
        parser.error(f"SCHEME = {unknown.pop()!r}: choose from {', '.join(RATES)}")
    RUNS.mkdir(exist_ok=True)
    if not (RUNS / "tokenizer.json").exists():
        run(TOKENIZER)
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None, None]
    free = queue.SimpleQueue()
    for cpu in cpus:
        free.put(cpu)

    def on_a_free_cpu(scheme: str) -> None:
        cpu = free.get()
        try:
            make(scheme, cpu)
        finally:
            free.put(cpu)

    with ThreadPoolExecutor(len(cpus)) as pool:
        list(pool.map(on_a_free_cpu, schemes))
    (HERE / "README.md").write_text(index())


if __name__ == "__main__":
    main()
