"""Trains a byte-level BPE tokenizer on documents."""

import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from nagjax.data.documents import LONGEST, Inputs, as_names, read_documents
from nagjax.data.stdlib import STDLIB, training_documents
from nagjax.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
from nagjax.errors import UserError
from nagjax.files import check_writable_file, naming_folder, write_bytes


def train_bpe(
    inputs: Inputs,
    vocab_size: int,
    out: str | os.PathLike,
    *,
    field: str = "text",
    longest: int = LONGEST,
    progress: Callable[[int], None] = lambda documents: None,
    say: Callable[[str], None] = lambda text: None,
) -> Tokenizer:
    """Trains a byte-level BPE (with GPT-2's pre-tokenisation) on documents, writes it to `out`, and returns it.

    `inputs` are files, folders or `hub:` datasets, as for `prepare`, or `"stdlib"`: the training split of this Python's
    standard library. `vocab_size` counts the 256 bytes and the end-of-text token. `progress` is called with the number
    of documents read, `say` with a line about the step that begins. Raises UserError if `vocab_size` has no room for
    those tokens or the inputs hold no text, and, before anything is read, if `out` cannot be written.
    """
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inputs = as_names(inputs)
    if vocab_size < 257:
        raise UserError("vocab_size", vocab_size, "needs at least 257: every byte and the end-of-text token")
    check_writable_file(out)
    if os.path.lexists(out):
        try:
            load_tokenizer(str(out))  # a tokenizer, which may be replaced
        except UserError:
            raise UserError("out", str(out), "is there already, and no tokenizer: give another file") from None
    count = 0
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    def read() -> Iterator[str]:
        nonlocal count
        files = [name for name in inputs if name != STDLIB]
        documents = chain(
            read_documents(files, field=field, longest=longest),
            training_documents() if len(files) < len(inputs) else (),
        )
        for count, text in enumerate(documents, 1):
            yield text
            progress(count)
        say("all documents are read; learning merges")

    engine.train_from_iterator(read(), trainer)
    if not count:
        raise UserError("inputs", inputs, "there is no text in them")
    with naming_folder(Path(out).parent, "out"):
        write_bytes(out, engine.to_str().encode())
    return load_tokenizer(str(out))
