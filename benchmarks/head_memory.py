"""What a step needs besides its state, with all logits at once and in chunks.

`python -m benchmarks.head_memory` (or `make plans`) compiles the training step of a small model with a large vocabulary
for this machine's CPU and asks the compiler; nothing is run. What benchmarks/results/head_memory.json lacks is
compiled, then the table of docs/memory.md is written.
"""

import jax

from benchmarks import plan_tables as tables
from benchmarks.compiled import ROOT, main
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from nagjax.runs.config import MeshConfig, RunConfig, TrainConfig
from nagjax.train.abstract_step import training_step
from pallas_kernels.origin import processor

DEPTH, WIDTH, CONTEXT = 4, 256, 1024
CASES = [("32768", "8"), ("131072", "4"), ("131072", "8"), ("131072", "16")]  # vocabulary, sequences


def measured(vocab: str, sequences: str) -> dict:
    """Temporary memory of the compiled step, in bytes, with all logits at once and in chunks."""
    chunks = {"whole": int(sequences) * CONTEXT, "chunked": None}
    return {name: temporary(int(vocab), int(sequences), chunk) for name, chunk in chunks.items()} | {"cpu": processor()}


def temporary(vocab: int, sequences: int, chunk: int | None) -> int:
    model = ModelConfig(DEPTH, WIDTH, context=CONTEXT, vocab=vocab, dtype="float32", remat="block")
    train = TrainConfig(batch=sequences, loss_chunk=chunk)
    config = RunConfig(find_scheme("nag")(), model, train=train, mesh=MeshConfig(data=1))
    step, args, _ = training_step(config, jax.devices()[:1])
    return step.lower(*args).compile().memory_analysis().temp_size_in_bytes


def texts(results: list[dict]) -> dict[str, str]:
    head = ("vocabulary", "tokens", "float32 logits", "step, all logits at once", "step, in chunks", "ratio")
    rows = []
    for one in results:
        vocab, tokens = int(one["case"][0]), int(one["case"][1]) * CONTEXT
        sizes = map(tables.mebibytes, (4 * tokens * vocab, one["whole"], one["chunked"]))
        rows.append((f"{vocab:,}", f"{tokens:,}", *sizes, f"{one['chunked'] / one['whole']:.0%}"))
    return {"head memory": tables.table(head, rows)}


PAGES = {ROOT / "docs" / "memory.md": texts}


if __name__ == "__main__":
    main("head_memory", CASES, measured, PAGES)
