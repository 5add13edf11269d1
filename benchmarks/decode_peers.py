"""Tokens per second beside transformers, for the same imported model on this CPU: `make bench-decode`, which writes
benchmarks/results/decode_cpu.json, one sitting for each CPU, and the table in docs/cpu.md.

transformers makes a random Llama-like model, nagjax imports it, both must write the same greedy tokens in float32,
and then they take turns in one sitting. Reading a prompt is timed as writing one token behind it; writing as the time
that further tokens take, in the same round. A ratio is the median over rounds of that round's two rates, by the clock
and, less moved by what else the machine does, by CPU time. transformers runs in an environment of its own
(benchmarks/hf_decode.py), with its default cache and, `compiled`, by torch.compile with a static one.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import plan_tables as tables
from benchmarks.peer import Peer
from benchmarks.sittings import kept, machine
from nagjax.files import check_writable_file
from nagjax.generate.sample import generate
from nagjax.generate.weights import Weights, with_weights
from nagjax.interop.importing import import_model
from nagjax.processes import cores
from pallas_kernels.origin import origin

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "decode_cpu.json"
PAGE = ROOT / "docs" / "cpu.md"
MODEL = {
    "num_hidden_layers": 16,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 16384,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
NAGJAX = "nagjax"
BATCHES = (1, 8)
NAMES = {"int8": "float32, weights int8"}
KINDS = {"float32": ("float32", "full"), "bfloat16": ("bfloat16", "full"), "int8": ("float32", "int8")}


def texts(sittings: list[dict]) -> dict[str, str]:
    """The tables of docs/cpu.md: rates as multiples of transformers', in wall-clock time and, in brackets, in CPU
    time."""
    rows = []
    for sitting in sittings:
        found = {(s["dtype"], s["weights"], s["batch"]): s["results"]["transformers"] for s in sitting["sizes"]}
        for kind, of in KINDS.items():
            own = [(found.get((*of, batch)), phase) for phase in ("decode", "prefill") for batch in BATCHES]
            told = [f"{o[f'{phase}_ratio']:.2f} ({o[f'{phase}_cpu_ratio']:.2f})" if o else "-" for o, phase in own]
            rows.append((sitting["cpu"], NAMES.get(kind, kind), *told, sitting["date"][:10]))
    phases = [f"{phase}, {batch} row{'s' if batch > 1 else ''}" for phase in ("written", "read") for batch in BATCHES]
    return {"decode": tables.table(("CPU", "", *phases, "measured"), rows)}


class Nagjax:
    def __init__(self, folder: Path, out: Path, dtype: str, weights: Weights):
        self.model = with_weights(import_model(folder, out, dtype=dtype), weights).model

    def written(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], np.ndarray]:
        """The new tokens, and the seconds they took, in wall-clock and in CPU time."""
        began, used = time.perf_counter(), time.process_time()
        new = generate(self.model, prompts, tokens=tokens, temperature=0.0)
        return new, np.array([time.perf_counter() - began, time.process_time() - used])


class Transformers(Peer):
    """Decoding of the same model by transformers."""

    def __init__(self, python: str, folder: Path, dtype: str, compiled: bool):
        options = [f"--folder={folder}", f"--dtype={dtype}", f"--config={json.dumps(MODEL)}"]
        options += [f"--threads={cores()}", *["--compiled"] * compiled]
        super().__init__(python, "hf_decode.py", *options)

    def written(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], np.ndarray]:
        found = json.loads(self.ask(json.dumps({"prompts": prompts, "tokens": tokens})))
        return found["new"], np.array(found["seconds"])


def measure(everyone: dict, batch: int, prompt: int, tokens: int, rounds: int) -> dict:
    """Tokens per second in reading and in writing, for each peer and as ratios."""
    ids = np.random.default_rng(0).integers(0, MODEL["vocab_size"], (batch, prompt)).tolist()
    first = {name: one.written(ids, tokens)[0] for name, one in everyone.items()}
    same = {
        name: float(np.mean(np.array(new) == np.array(first[NAGJAX]))) for name, new in first.items() if name != NAGJAX
    }
    for one in everyone.values():
        one.written(ids, 1)
    rates = {name: {"prefill": [], "decode": []} for name in everyone}
    for _ in range(rounds):
        for name, one in everyone.items():
            read, whole = one.written(ids, 1)[1], one.written(ids, tokens)[1]
            rates[name]["prefill"].append(batch * prompt / read)
            rates[name]["decode"].append(batch * (tokens - 1) / (whole - read))
    rows = {}
    for name, own in rates.items():
        rows[name] = {f"{phase}_tokens_per_second": float(np.median(found, axis=0)[0]) for phase, found in own.items()}
        for phase, found in own.items() if name != NAGJAX else ():
            ratio, cpu_ratio = np.median(np.array(rates[NAGJAX][phase]) / np.array(found), axis=0).tolist()
            rows[name] |= {f"{phase}_ratio": ratio, f"{phase}_cpu_ratio": cpu_ratio}
        if name != NAGJAX:
            rows[name]["same_tokens"] = same[name]
    return {"batch": batch, "prompt": prompt, "tokens": tokens, "results": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="Python of the environment with torch and transformers")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="int8: nagjax's weights alone")
    parser.add_argument("--compiled", action="store_true", help="also transformers by torch.compile")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    check_writable_file(options.out)
    before = machine()
    sizes, versions = [], {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "llama"
        for kind in options.kinds:
            dtype, weights = KINDS[kind]
            peers = {"transformers": Transformers(options.torch, source, dtype, False)}
            if options.compiled:
                peers["transformers_compiled"] = Transformers(options.torch, source, dtype, True)
            versions = peers["transformers"].about
            everyone = {NAGJAX: Nagjax(source, Path(folder) / f"run_{kind}", dtype, weights)} | peers
            for batch in options.batches:
                found = measure(everyone, batch, options.prompt, options.tokens, options.rounds)
                sizes.append({"dtype": dtype, "weights": weights} | found)
                for name, row in found["results"].items():
                    print(
                        f"{kind} x {batch:2} {name:22}", *(f"{key} {own:.2f}" for key, own in row.items()), flush=True
                    )
            for peer in peers.values():
                peer.end()
    for size in sizes:
        exact = size["dtype"] == "float32" and size["weights"] == "full"
        if exact and any(row.get("same_tokens", 1.0) < 1.0 for row in size["results"].values()):
            raise SystemExit("the greedy tokens differ: nothing is written")
    result = {"bench": "decode", "model": MODEL, "rounds": options.rounds, "sizes": sizes}
    about = origin()
    about["versions"] |= versions
    sittings = kept(options.out, result | before | about)
    if options.out == RESULTS:
        PAGE.write_text(tables.inserted(PAGE.read_text(), texts(sittings)))


if __name__ == "__main__":
    main()
