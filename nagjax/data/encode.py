"""From a stream of documents to tokenised documents, in bounded memory."""

from collections.abc import Iterable, Iterator

from nagjax.data.store import Document
from nagjax.data.tokenizer import Tokenizer

_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 512, 1 << 21


def encode_documents(texts: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[tuple[str, Document]]:
    """Pairs (text, split) to pairs (split, tokenised document), in order.

    A few megabytes of text are encoded at a time, which gives the tokenizer's threads work.
    """
    for batch in _batches(texts):
        encoded = tokenizer.encode_batch([text for text, _ in batch])
        for (text, split), ids in zip(batch, encoded, strict=True):
            yield split, Document(ids, len(text.encode()))


def _batches(texts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, size = [], 0
    for text, split in texts:
        batch.append((text, split))
        size += len(text)
        if len(batch) >= _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
