"""From a stream of documents to tokenised documents, in bounded memory."""

from collections.abc import Iterable, Iterator

import numpy as np

from nagjax.data.chat_template import ChatTemplate
from nagjax.data.conversation import ANSWERS, messages_of, refuse_special
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


def encode_conversations(
    documents: Iterable[tuple[str, str]], tokenizer: Tokenizer, template: ChatTemplate
) -> Iterator[tuple[str, Document]]:
    """Pairs (conversation, split), as `nagjax.data.conversation` has them, to pairs (split, tokenised document), in
    order; the tokens of its answers count. The end of the document counts where its last message is an answer.

    Raises UserError: what the template raises, and for a message that spells a special token.
    """
    for batch in _batches(documents):
        shown, last = [], []
        for document, _ in batch:
            messages = messages_of(document)
            refuse_special(messages, tokenizer)
            shown.append(template.render(messages))
            last.append(messages[-1]["role"] == ANSWERS)
        encoded = tokenizer.encode_templated([text for text, _ in shown])
        for (_, split), (text, spans), (ids, starts), ends in zip(batch, shown, encoded, last, strict=True):
            counted = np.zeros(len(ids) + 1, bool)
            for begin, stop in spans:
                counted[:-1] |= (starts >= begin) & (starts < stop)
            if len(ids) and ids[-1] == tokenizer.end_of_text:  # the template's own; every document gets one
                ids, counted = ids[:-1], counted[:-1]
            counted[-1] = ends
            table = tokenizer.token_bytes
            yield split, Document(ids, len(text.encode()) if table is None else int(table[ids].sum()), counted)


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
