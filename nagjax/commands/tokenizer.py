"""tokenizer train: learn a BPE tokenizer."""

import shlex
from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL
from nagjax.console import Progress, say
from nagjax.ranges import Count, Range


def train(
    inputs: Annotated[tuple[str, ...], POSITIONAL],
    out: Path,
    vocab: Annotated[int, Range(ge=257, le=2**31 - 1)] = 16384,
    field: str = "text",
    longest: Count = 2**26,
) -> None:
    """Learn a byte-level BPE tokenizer from documents.

    Args:
        inputs: files or folders, as for nagjax data prepare; or stdlib, for runs with --data.path stdlib.
        out: the tokenizer.json to write.
        vocab: number of tokens in the vocabulary, including the 256 bytes and the end-of-text token.
        field: the field with the text in JSON lines and table rows.
        longest: most characters that one JSON line or table row may have.
    """
    say(f"learning a tokenizer of {vocab:,} tokens from {', '.join(inputs)}, into {out}")
    from nagjax.data import train_bpe
    from nagjax.data.stdlib import STDLIB

    progress = Progress("documents read:")
    trained = train_bpe(inputs, vocab, out, field=field, longest=longest, progress=progress, say=say)
    name = shlex.quote(str(out))
    use = f"train --data.tokenizer {name}" if inputs == (STDLIB,) else f"data prepare ... --tokenizer {name}"
    print(f"{out}: {trained.vocab_size} tokens\nuse it: nagjax {use}")


SUBCOMMANDS = (train,)
