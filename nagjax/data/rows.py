"""Rows of fixed length out of a token stream, any of which can be made on its own: packed, whole documents, or one
document each."""

import numpy as np
from jaxtyping import Float32, Int32, Int64

from nagjax.data.stream import TokenStream


class Rows:
    """Row `r` predicts the stream's tokens `[r * context, (r + 1) * context)`; a random-access data source.

    Each token of the stream is a target exactly once, the end-of-text token of every document included. The
    input before a document's first token is the end-of-text token of the document before it: it opens
    documents as well as closing them, and belongs to the document it opens, so no target is lost at a border
    and no input or attention crosses one. `begins` takes its place there, which is the token that the
    tokenizer puts in front of a text, unless the document has that itself. A document longer than the row goes
    on in the next row, as a new segment whose first input is the token before.

    What lies past the end of the stream, whole rows included, is padding: segment 0, weight 0, end-of-text. Weight 0
    have targets that the corpus says do not count, too: what is no answer in a conversation.
    """

    def __init__(self, stream: TokenStream, context: int, end_of_text: int, begins: int | None = None):
        self.stream, self.context, self.end_of_text = stream, context, end_of_text
        self.begins = end_of_text if begins is None else begins

    def __len__(self) -> int:
        return -(-len(self.stream) // self.context)

    def __getitem__(self, row: int) -> dict[str, Int32[np.ndarray, "T"] | Float32[np.ndarray, "T"]]:
        start, stop = self.targets(int(row)) if int(row) < len(self) else (0, 0)
        stop, context = min(stop, start + self.context), self.context
        n = stop - start
        borders = self.stream.borders(start, stop)
        lengths = np.diff(borders)
        tokens, targets = np.full((2, context), self.end_of_text, np.int32)
        segment_ids, positions = np.zeros((2, context), np.int32)
        weights = np.zeros(context, np.float32)
        if n:
            before = min(start, 1)  # the token in front, with the same read
            read, counted = self.stream.read_counted(start - before, stop)
            weights[:n] = counted[before:]
            targets[:n] = read[before:]
            tokens[1 - before : n] = read[:-1]
        segment_ids[:n] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        positions[:n] = np.arange(n) - np.repeat(borders[:-1] - start, lengths)
        if self.begins != self.end_of_text:
            opens = (segment_ids > 0) & (positions == 0) & (tokens == self.end_of_text) & (targets != self.begins)
            if start and self.stream.borders(start - 1, start + 1).size == 2:
                opens[0] = False  # of a document that goes on: an end-of-text token in front is its own, as of a turn
            tokens[opens] = self.begins
        return dict(tokens=tokens, targets=targets, segment_ids=segment_ids, positions=positions, weights=weights)

    def targets(self, row: int) -> tuple[int, int]:
        """Where the targets of a row stand in the stream; those that do not fit the row are cut off."""
        return row * self.context, min((row + 1) * self.context, len(self.stream))


class DocumentRows(Rows):
    """Row `r` predicts document `r`, its end-of-text token included, as far as it fits; the rest of the row is padding.

    As in `Rows` the first input is the end-of-text token, and rows past the last document are padding.
    """

    def __len__(self) -> int:
        return self.stream.document_count

    def targets(self, row: int) -> tuple[int, int]:
        return self.stream.document(row)


class WholeRows(Rows):
    """Row `r` predicts as many documents, one behind the other, as fit whole; a document longer than the row has one
    for itself, and its rest is cut off. Else as in `DocumentRows`."""

    def __init__(self, stream: TokenStream, context: int, end_of_text: int, begins: int | None = None):
        super().__init__(stream, context, end_of_text, begins)
        self.ends = whole_rows(stream.document_ends, context)

    def __len__(self) -> int:
        return len(self.ends)

    def targets(self, row: int) -> tuple[int, int]:
        return int(self.ends[row - 1]) if row else 0, int(self.ends[row])


def whole_rows(document_ends: Int64[np.ndarray, "documents"], context: int) -> Int64[np.ndarray, "rows"]:
    """Where the rows of whole documents end, documents being taken in order."""
    count = len(document_ends)
    starts = np.append(0, document_ends)[:count]
    behind = np.searchsorted(document_ends, starts + context, "right")  # a row that begins with each document
    behind = np.maximum(behind, np.arange(1, count + 1)).tolist()
    last, done = [], 0
    while done < count:
        done = behind[done]
        last.append(done - 1)
    return document_ends[np.array(last, np.int64)]
