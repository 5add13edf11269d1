"""Talk with a model."""

import io
import sys
from pathlib import Path
from typing import Annotated, Literal

from nagjax.arguments import POSITIONAL
from nagjax.console import for_terminal, note
from nagjax.errors import UserError
from nagjax.ranges import Count, Natural, NonNegative, Range, Seed, Share


def main(
    run: Annotated[Path, POSITIONAL],
    system: str | None = None,
    template: str | None = None,
    tokens: Count = 256,
    temperature: NonNegative = 0.8,
    top_k: Natural = 0,
    top_p: Annotated[float, Range(gt=0, le=1)] = 0.95,
    min_p: Share = 0.0,
    seed: Seed = 0,
    weights: Literal["full", "int8"] = "full",
) -> None:
    """Talk with a model: each line of the input is a message, and the model answers it, knowing what was said before.

    An empty line begins a new conversation; the end of the input (Ctrl-D) ends the command. When a conversation is
    longer than the context, its older half is forgotten.

    Args:
        run: a run folder, trained on conversations, or a model that nagjax import reads.
        system: a system message, put at the beginning of each conversation.
        template: a file with a Jinja template; by default the one in the run's folder.
        tokens: maximum number of tokens in an answer.
        temperature: sampling temperature; 0 always takes the likeliest token.
        top_k: sample from this many of the likeliest tokens; 0: from all of them.
        top_p: sample from the smallest set of the top k tokens whose total probability reaches this.
        min_p: drop tokens whose probability is below this fraction of the likeliest token's.
        seed: random seed of sampling.
        weights: int8: matrices are stored in 8 bits, with a scale per output channel.
    """
    note(f"opening {run}")
    from nagjax.data.conversation import ANSWERS, special_in
    from nagjax.generate.chat import answer, find_form
    from nagjax.generate.weights import with_weights
    from nagjax.interop.load import load

    opened = with_weights(load(run), weights)
    find_form(opened, template)  # refused before anything is typed
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    start = [{"role": "system", "content": system}] if system else []
    said = list(start)
    while (line := _line()) is not None:
        if not line.strip():
            said = list(start)
            continue
        asked = [*said, {"role": "user", "content": line}]
        try:
            text = answer(opened, [asked], template=template, tokens=tokens, slide=True, **sampling)[0]
        except UserError as error:
            if error.field != "messages":  # what this message is refused for
                raise
            note(str(error))
            continue
        print(for_terminal(text), flush=True)
        answered = {"role": ANSWERS, "content": text}
        if special := special_in([answered], opened.tokenizer):
            note(f"the answer spells the special token {special}: the conversation goes on without this exchange")
        else:
            said = [*asked, answered]


def _line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
