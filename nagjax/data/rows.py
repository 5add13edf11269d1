"""Rows of fixed length from a token stream, each of which can be made independently: packed, whole documents, or one
document per row."""

import numpy as np
from jaxtyping import Float32, Int32, Int64

from nagjax.data.stream import TokenStream


class Rows:
    """Packed rows: row `r` predicts the stream's tokens `[r * context, (r + 1) * context)`. A random-access data
    source.

    Each token of the stream, including the end-of-text token of every document, is a target exactly once. The input
    before a document's first token is the end-of-text token of the document before it. That token thus both closes a
    document and opens the next one, and it belongs to the segment that it opens: so no target is lost at a boundary,
    and no input or attention crosses one. If the tokenizer puts a token in front of every text, that token, `begins`,
    takes this place, unless the document itself begins with it. A document longer than the row continues in the next
    row, as a new segment whose first input is the token before.

    Positions past the end of the stream, including whole rows, are padding: segment 0, weight 0, end-of-text. Targets
    that the corpus marks as not counting, such as the parts of a conversation that are not answers, have weight 0, too.
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
            before = min(start, 1)  # the token before the row, in the same read
            read, counted = self.stream.read_counted(start - before, stop)
            weights[:n] = counted[before:]
            targets[:n] = read[before:]
            tokens[1 - before : n] = read[:-1]
        segment_ids[:n] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        positions[:n] = np.arange(n) - np.repeat(borders[:-1] - start, lengths)
        if self.begins != self.end_of_text:
            opens = (segment_ids > 0) & (positions == 0) & (tokens == self.end_of_text) & (targets != self.begins)
            if start and self.stream.borders(start - 1, start + 1).size == 2:
                opens[0] = False  # inside a document: it may contain an end-of-text token, as of a turn
            tokens[opens] = self.begins
        return dict(tokens=tokens, targets=targets, segment_ids=segment_ids, positions=positions, weights=weights)

    def targets(self, row: int) -> tuple[int, int]:
        """The positions (start, stop) in the stream of a row's targets; those beyond the row's length are cut off."""
        return row * self.context, min((row + 1) * self.context, len(self.stream))


class DocumentRows(Rows):
    """Row `r` predicts document `r`, including its end-of-text token, as far as it fits; the rest of the row is
    padding.

    As in `Rows`, the first input is the end-of-text token, and rows past the last document are padding.
    """

    def __len__(self) -> int:
        return self.stream.document_count

    def targets(self, row: int) -> tuple[int, int]:
        return self.stream.document(row)


class WholeRows(Rows):
    """Row `r` predicts as many consecutive documents as fit completely; a document longer than the row has one for
    itself, and its rest is cut off. Otherwise like `DocumentRows`."""

    def __init__(self, stream: TokenStream, context: int, end_of_text: int, begins: int | None = None):
        super().__init__(stream, context, end_of_text, begins)
        self.ends = whole_rows(stream.document_ends, context)

    def __len__(self) -> int:
        return len(self.ends)

    def targets(self, row: int) -> tuple[int, int]:
        return int(self.ends[row - 1]) if row else 0, int(self.ends[row])


def whole_rows(document_ends: Int64[np.ndarray, "documents"], context: int) -> Int64[np.ndarray, "rows"]:
    """The positions in the stream, int64, at which rows of whole documents end, if documents are taken in order."""
    count = len(document_ends)
    starts = np.append(0, document_ends)[:count]
    behind = np.searchsorted(document_ends, starts + context, "right")  # by first document of a row
    behind = np.maximum(behind, np.arange(1, count + 1)).tolist()
    last, done = [], 0
    while done < count:
        done = behind[done]
        last.append(done - 1)
    return document_ends[np.array(last, np.int64)]
