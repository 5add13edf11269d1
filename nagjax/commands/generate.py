"""Continue prompts."""

from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL
from nagjax.ranges import Count, NonNegative, Range, Seed


def main(
    run: Annotated[Path, POSITIONAL],
    prompt: tuple[str, ...] = ("",),
    tokens: Count = 64,
    temperature: NonNegative = 0.8,
    top_p: Annotated[float, Range(gt=0, le=1)] = 0.95,
    seed: Seed = 0,
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
    from nagjax.generate.sample import complete
    from nagjax.generate.speed import tokens_per_second
    from nagjax.runs.opening import open_run

    opened = open_run(run)
    texts = complete(opened, list(prompt), tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    for start, text in zip(prompt, texts, strict=True):
        print(f"{start}{text}", end="\n---\n" if len(prompt) > 1 else "\n")
    if speed:
        rates = tokens_per_second(opened, prompt, tokens)
        print("  ".join(f"{name}: {rate:.1f} tokens/s" for name, rate in rates.items()))
