"""What a step needs besides its state, with logits whole and in chunks: `python benchmarks/head_memory.py`.

Compiles the training step of a small model with a large vocabulary for this machine's devices and asks the compiler;
nothing is run. Prints the table that docs/memory.md holds.
"""

import argparse

import jax

from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from nagjax.runs.config import MeshConfig, RunConfig, TrainConfig
from nagjax.train.abstract_step import training_step

MIB = 2**20
DEPTH, WIDTH, CONTEXT = 4, 256, 1024
CASES = [(32_768, 8), (131_072, 4), (131_072, 8), (131_072, 16)]  # vocabulary, sequences


def temporary_bytes(vocab: int, batch: int, chunk: int | None) -> int:
    """Temporary memory of the compiled step, of one device."""
    model = ModelConfig(DEPTH, WIDTH, context=CONTEXT, vocab=vocab, dtype="float32", remat="block")
    train = TrainConfig(batch=batch, loss_chunk=chunk)
    config = RunConfig(find_scheme("nag")(), model, train=train, mesh=MeshConfig(data=1))
    step, args, _ = training_step(config, jax.devices()[:1])
    return step.lower(*args).compile().memory_analysis().temp_size_in_bytes


def table() -> str:
    """Markdown: a row for each vocabulary and batch."""
    lines = [
        "| vocabulary | tokens | float32 logits | step, all logits at once | step, in chunks | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for vocab, batch in CASES:
        tokens = batch * CONTEXT
        whole, chunked = (temporary_bytes(vocab, batch, chunk) for chunk in (tokens, None))
        sizes = (f"{size / MIB:,.0f} MiB" for size in (4 * tokens * vocab, whole, chunked))
        lines.append(f"| {vocab:,} | {tokens:,} | {' | '.join(sizes)} | {chunked / whole:.0%} |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"{DEPTH} blocks x {WIDTH}, blocks recomputed, jax {jax.__version__}, {jax.devices()[0].device_kind}\n")
    print(table())


if __name__ == "__main__":
    main()
