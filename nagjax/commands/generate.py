"""Continue prompts."""

from pathlib import Path
from typing import Annotated, Literal

from nagjax.arguments import POSITIONAL
from nagjax.console import for_terminal, note
from nagjax.errors import UserError
from nagjax.ranges import Count, Natural, NonNegative, Range, Seed, Share


def main(
    run: Annotated[Path, POSITIONAL],
    prompt: tuple[str, ...] = ("",),
    tokens: Count | None = None,
    temperature: NonNegative = 0.8,
    top_k: Natural = 0,
    top_p: Annotated[float, Range(gt=0, le=1)] = 0.95,
    min_p: Share = 0.0,
    stop: tuple[str, ...] = (),
    slide: bool = False,
    seed: Seed = 0,
    weights: Literal["full", "int8"] = "full",
    speed: bool = False,
) -> None:
    """Continue prompts, all of them in one batch, with a key/value cache.

    Args:
        run: a run folder, or a model that nagjax import reads.
        prompt: one or more texts to continue.
        tokens: maximum number of new tokens for each prompt; a text also ends where the model ends the document. By
            default as many as fit the context, at most 64.
        temperature: sampling temperature; 0 always takes the likeliest token.
        top_k: sample from this many of the likeliest tokens; 0: from all of them.
        top_p: sample from the smallest set of the top k tokens whose total probability reaches this.
        min_p: drop tokens whose probability is below this fraction of the likeliest token's.
        stop: the new text ends before the first of these texts.
        slide: let the text grow longer than the context: whenever the context is full, its older half is forgotten.
        seed: random seed of sampling.
        weights: int8: matrices are stored in 8 bits, with a scale per output channel.
        speed: also time greedy generation with and without skipping, and compare the time saved with the FLOPs saved.
    """
    if not prompt:
        raise UserError("prompt", prompt, "give a text or several; without --prompt a document is begun")
    if speed and slide:
        raise UserError("speed", speed, "is for texts that fit the context: leave out --slide")
    note(f"opening {run}")
    from nagjax.generate.sample import complete, fitting_tokens
    from nagjax.generate.text import encodable
    from nagjax.generate.weights import with_weights
    from nagjax.interop.load import load

    opened = with_weights(load(run), weights)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    prompt = tuple(map(encodable, prompt))
    if tokens is None:
        tokens = fitting_tokens(opened, prompt, slide=slide)
    texts = complete(opened, list(prompt), tokens=tokens, stop=stop, slide=slide, **sampling)
    for start, text in zip(prompt, texts, strict=True):
        print(for_terminal(f"{start}{text}"), end="\n---\n" if len(prompt) > 1 else "\n")
    if speed:
        from nagjax.measure.generation_times import generation_times
        from nagjax.measure.routing_times import told

        found = generation_times(opened, prompt, tokens)
        print("  ".join(f"{name}: {rate:.1f} tokens/s" for name, rate in found["tokens_per_second"].items()))
        if "executed" in found:
            print(f"{found['executed']:.1%} of the pairs of token and sublayer ran: {told(found)}")
