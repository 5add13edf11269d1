"""What a long context with a large vocabulary takes of one TPU v5p and of H200s, by `nagjax plan`.

`python -m benchmarks.long_context` (or `make plans`) plans the runs below with the command line that it then prints and
puts into docs/memory.md, so that anybody gets the same figures. What benchmarks/results/long_context.json lacks is
compiled; then the two tables are written.
"""

import json
import tempfile
from pathlib import Path

from benchmarks import plan_tables as tables
from benchmarks.compiled import MINUTES, ROOT, main
from nagjax import cli
from nagjax.plan.units import gigabytes, milliseconds, scaled
from nagjax.train.head_loss import chunk_tokens

COMMON = "--preset 350M --vocab 131072"
# No slice has fewer than four v5p, so each of the four gets a whole copy of the model's state and one sequence.
V5P = ("v5p:2x2x1", "--context 32768 --batch 4 --mesh.data 4 --remat block")
H200 = ("h200x1", "--context 32768 --batch 1 --remat block --attention tokamax")
ONE_CHUNK = "--loss-chunk 32768"
HEAD = [V5P, (V5P[0], f"{V5P[1]} {ONE_CHUNK}"), H200, (H200[0], f"{H200[1]} {ONE_CHUNK}")]
ATTENTION = [
    ("h200x1", "--context 2048 --batch 8 --remat none --attention xla"),
    ("h200x1", "--context 2048 --batch 8 --remat none --attention tokamax"),
    ("h200x1", "--context 32768 --batch 1 --remat block --attention xla"),
    H200,
    ("h200x8", "--context 32768 --batch 8 --remat block --attention tokamax"),
]
CASES = list(dict.fromkeys(HEAD + ATTENTION))


def command(topology: str, options: str) -> str:
    return f"nagjax plan {COMMON} --topology {topology} {options}"


def measured(topology: str, options: str) -> dict:
    """The plan's figures for each chip: bytes of its memory, FLOPs, bytes moved, and the least time of a step."""
    words = command(topology, options)
    print(words)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        if cli.main([*words.split()[1:], "--minutes", str(MINUTES), "--json", str(path)]):
            raise SystemExit(f"refused: {words}")
        plan = json.loads(path.read_text())
    train, model, mesh = plan["config"]["train"], plan["config"]["model"], plan["mesh"]
    sequences, context = train["batch"] // (mesh["data"] * mesh["fsdp"]), model["context"]
    chunk = train["loss_chunk"] or chunk_tokens(sequences * context, model["vocab"])
    on_a_chip = {"sequences": sequences, "context": context, "chunk": chunk}
    chosen = {"attention": plan["choices"]["attention"], "remat": model["remat"]}
    found = {name: plan[name] for name in ("parameters", "memory", "fits", "flops", "moved", "sent", "bound")}
    return on_a_chip | chosen | found | {name: plan[name] for name in ("seconds_to_lower", "seconds_to_compile")}


def texts(results: list[dict]) -> dict[str, str]:
    found = {tuple(one["case"]): one for one in results}
    said = f"Each row is `nagjax plan {COMMON}` with the options in its last column:\n\n"
    step = "peak, matmuls, main memory moved, at the bound, options".split(", ")
    chunks = [_row(found[case], f"{found[case]['chunk']:,}") for case in HEAD if case in found]
    ways = [_row(found[case], *_way(found[case])) for case in ATTENTION if case in found]
    return {
        "long context: head": said + tables.table(("machine", "tokens in a chunk", *step), chunks),
        "long context: attention": said + tables.table(("machine", "tokens", "attention", "remat", *step), ways),
    }


def _row(one: dict, *cells: str) -> tuple[str, ...]:
    memory, (topology, options) = one["memory"], one["case"]
    peak = f"{gigabytes(memory['peak'])} of {gigabytes(memory['capacity'])}{'' if one['fits'] else ': does not fit'}"
    step = (scaled(one["flops"], "FLOP"), scaled(one["moved"], "B"), milliseconds(one["bound"]["seconds"]))
    return (f"`{topology}`", *cells, peak, *step, f"`--topology {topology} {options}`")


def _way(one: dict) -> tuple[str, str, str]:
    return f"{one['sequences']} x {one['context']:,}", one["attention"], one["remat"]


PAGES = {ROOT / "docs" / "memory.md": texts}


if __name__ == "__main__":
    main("long_context", CASES, measured, PAGES)
