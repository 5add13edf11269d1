"""How soon every verb says something: `python benchmarks/command_times.py` writes results/command_times.json.

For each verb the time from the start of the process to the end of `--help`, to the end of an option that there is not
(refused with code 2), and to the first line of the verb at work, on a tiny run made for it. The smallest of `--best`
tries counts: what else runs on the machine can only add to it.
"""

import argparse
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nagjax.cli import functions, verbs
from nagjax.files import check_writable_file
from pallas_kernels.origin import origin

ROOT = Path(__file__).resolve().parents[1]
NAGJAX = (sys.executable, "-m", "nagjax.cli")
LIMIT = 180.0  # seconds to the first line
TINY = "--depth 2 --width 16 --context 16 --batch 2 --steps 2 --eval-every 2 --eval-batches 1 --mesh.data 1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--best", type=int, default=3, help="tries of each")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/command_times.json")
    parser.add_argument("--docs", type=Path, default=None, help="page whose table of times is renewed")
    given = parser.parse_args()
    check_writable_file(given.out)
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prepare(place)
        rows = {}
        for words, args in work(place).items():
            rows[words] = {
                "help": best(given.best, lambda words=words: whole([*words.split(), "--help"], 0)),
                "typo": best(given.best, lambda words=words: whole([*words.split(), "--no-such-option"], 2)),
                "first_line": best(given.best, lambda words=words, args=args: first_line(words, args, place)),
            }
            print(words, rows[words], flush=True)
    result = {
        **origin(),
        "rows": rows,
        "best_of": given.best,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],  # before, after: processes that wanted a CPU
        "seconds": round(time.monotonic() - began),
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    if given.docs:
        given.docs.write_text(with_table(given.docs.read_text(), result))


def prepare(place: Path) -> None:
    """Makes corpora of text and of conversations, runs of two steps on them, a config, and a model in another
    format."""
    (place / "text").mkdir()
    (place / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (place / "text" / "b.txt").write_text("and the dog sleeps on. " * 100)
    talks = [json.dumps({"prompt": f"what jumps? {i}", "response": "the fox"}) for i in range(40)]
    (place / "talks.jsonl").write_text("\n".join(talks))
    for words in (
        f"data prepare {place}/text --out {place}/corpus --validation 0.5",
        f"data chat {place}/talks.jsonl --out {place}/talks --validation 0.5",
        f"train {TINY} --save-every 1 --keep 2 --data.path {place}/corpus --out {place}/run",
        f"train {TINY} --data.path {place}/talks --out {place}/talker",
        f"train {TINY} --scheme plain --no-qk-norm --data.path {place}/corpus --out {place}/plain",
        f"export {place}/plain --out {place}/model",
    ):
        subprocess.run([*NAGJAX, *words.split()], check=True, stdout=subprocess.DEVNULL)
    with (place / "run.yaml").open("w") as file:
        subprocess.run([*NAGJAX, "config", str(place / "run")], check=True, stdout=file)


def work(place: Path) -> dict[str, str]:
    """Every verb with arguments with which it works; OUT is new for each try."""
    args = {
        "average": f"{place}/run --out OUT --batches 1",
        "bench step": "",
        "bench compile": "",
        "bench mod": "",
        "calibrate": f"{place}/run --rates 0,0.2 --batches 1",
        "chat": f"{place}/talker --tokens 4",
        "compare": f"{place}/run {place}/plain --out OUT",
        "completion": "bash",
        "config": f"{place}/run",
        "data chat": f"{place}/talks.jsonl --out OUT",
        "data prepare": f"{place}/text --out OUT",
        "demo": f"--depth 2 --steps 2 --width 16 --data {place}/corpus --out OUT",
        "diagnose": f"{place}/run --out OUT --batches 1",
        "eval": f"{place}/run --batches 1",
        "export": f"{place}/run --out OUT --format bundle",
        "generate": f"{place}/run --tokens 4",
        "import": f"{place}/model --out OUT",
        "info": f"{place}/run",
        "map": f"{place}/run --text fox --out OUT",
        "plan": "--topology v5e:2x2",
        "profile": f"{TINY} --data.path {place}/corpus --traced 1 --out OUT",
        "prune": f"{place}/run --out OUT --count 1 --batches 1",
        "sweep": f"{place}/run.yaml --out OUT --vary lr=0.001",
        "tokenizer train": f"{place}/text --out OUT --vocab 260",
        "train": f"{TINY} --data.path {place}/corpus --out OUT",
    }
    known = {words for verb in verbs() for words in functions(verb)}
    assert known == args.keys(), known ^ args.keys()
    return args


def best(tries: int, measure) -> dict[str, float] | None:
    """The least wall-clock time and the least CPU time, in seconds, which may come from different tries."""
    found = [measure() for _ in range(tries)]
    if None in found:
        return None
    clock, cpu = (round(min(times), 2) for times in zip(*found, strict=True))
    return {"seconds": clock, "cpu_seconds": cpu}


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def whole(args: list[str], code: int) -> tuple[float, float]:
    """The wall-clock and CPU seconds of a command that must end with this exit code."""
    began, before = time.monotonic(), cpu_of_children()
    done = subprocess.run([*NAGJAX, *args], capture_output=True)
    seconds = time.monotonic() - began
    assert done.returncode == code, (args, done)
    return seconds, cpu_of_children() - before


def first_line(words: str, args: str, place: Path) -> tuple[float, float] | None:
    """The wall-clock and CPU seconds until the first line on either stream, after which the command is ended; None if
    that line is a refusal (the compilers of `plan` are an optional extra)."""
    out = place / f"out-{time.monotonic_ns()}"
    began, before = time.monotonic(), cpu_of_children()
    process = subprocess.Popen(
        [*NAGJAX, *words.split(), *args.replace("OUT", str(out)).split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )
    try:
        ready, _, _ = select.select([process.stdout], [], [], LIMIT)
        seconds = time.monotonic() - began
        line = os.read(process.stdout.fileno(), 200) if ready else b""
    finally:
        process.kill()
        process.communicate()
    return None if not line or b"error:" in line else (seconds, cpu_of_children() - before)


def with_table(page: str, result: dict) -> str:
    """The page with the table between its marks replaced."""
    head, mark, rest = page.partition("<!-- command times -->\n")
    _, end, tail = rest.partition("<!-- end of command times -->\n")
    assert mark and end, "the page has no marks"
    return head + mark + table(result) + end + tail


def table(result: dict) -> str:
    def shown(value: dict[str, float] | None) -> str:
        return "refused here" if value is None else f"{value['seconds']:.2f} ({value['cpu_seconds']:.2f})"

    text = "| command | first line | `--help` | an option that there is not |\n|---|---:|---:|---:|\n"
    for words, row in result["rows"].items():
        text += f"| `nagjax {words}` | {shown(row['first_line'])} | {shown(row['help'])} | {shown(row['typo'])} |\n"
    text += "\nSeconds from the start of the process (of them on the CPU: what an idle core needs), the smallest of "
    text += f"{result['best_of']} tries each, on {result['host']} ({result['cpu']}) with {result['load'][0]} to "
    text += f"{result['load'][1]} processes that wanted one, "
    return text + f"{result['date'][:10]}, commit {result['commit']}, by `python benchmarks/command_times.py`.\n"


if __name__ == "__main__":
    main()
