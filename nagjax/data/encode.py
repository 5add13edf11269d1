"""Tokenises a stream of documents in bounded memory."""

from collections.abc import Iterable, Iterator

import numpy as np

from nagjax.data.chat_template import ChatTemplate
from nagjax.data.conversation import ANSWERS, Message, messages_of, shortened
from nagjax.data.store import Document
from nagjax.data.tokenizer import Tokenizer
from nagjax.errors import UserError

_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 512, 1 << 21


def encode_documents(texts: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[tuple[str, Document]]:
    """Turns pairs (text, split) into pairs (split, tokenised document), in order.

    A few megabytes of text are encoded at a time, enough to keep the tokenizer's threads busy.
    """
    for batch in _batches(texts):
        encoded = tokenizer.encode_batch([text for text, _ in batch])
        for (text, split), ids in zip(batch, encoded, strict=True):
            yield split, Document(ids, len(text.encode()))


def encode_conversations(
    documents: Iterable[tuple[str, str]], tokenizer: Tokenizer, template: ChatTemplate
) -> Iterator[tuple[str, Document]]:
    """Turns pairs (conversation, split), with conversations as `nagjax.data.conversation` writes them, into pairs
    (split, tokenised document), in order. The tokens that contain a character of an answer count as targets. The end of
    the document counts if its last message is an answer.

    Raises UserError where the template does, and for a template that shows none of a conversation's answers.
    """
    for batch in _batches(documents):
        shown, last = [], []
        for document, _ in batch:
            messages = messages_of(document)
            shown.append(template.render(messages))
            _refuse_hidden(messages, *shown[-1], template.name)
            last.append(messages[-1]["role"] == ANSWERS)
        encoded = tokenizer.encode_templated([text for text, _ in shown])
        for (_, split), (text, spans), (ids, starts, stops), ends in zip(batch, shown, encoded, last, strict=True):
            counted = np.zeros(len(ids) + 1, bool)
            for begin, stop in spans:
                counted[:-1] |= (starts < stop) & (stops > begin)
            if len(ids) and ids[-1] == tokenizer.end_of_text:  # written by the template; every document gets one anyway
                ids, counted = ids[:-1], counted[:-1]
            counted[-1] = ends
            table = tokenizer.token_bytes
            yield split, Document(ids, len(text.encode()) if table is None else int(table[ids].sum()), counted)


def _refuse_hidden(messages: list[Message], text: str, spans: list[tuple[int, int]], name: str) -> None:
    said = any(message["role"] == ANSWERS and message["content"].strip() for message in messages)
    if said and not any(text[begin:stop].strip() for begin, stop in spans):
        fix = f"it has to show what the role {ANSWERS} says; of {shortened(str(messages))} it shows no answer"
        raise UserError("template", name, fix)


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
