"""Packing: a token stream cut into rows of fixed length, any of which can be made on its own."""

import numpy as np
from jaxtyping import Float32, Int32

from nagjax.data.store import TokenStream


class Rows:
    """Row `r` predicts the stream's tokens `[r * context, (r + 1) * context)`; a random-access data source.

    Each token of the stream is a target exactly once, the end-of-text token of every document included. The
    input before a document's first token is the end-of-text token of the document before it: it opens
    documents as well as closing them, and belongs to the document it opens, so no target is lost at a border
    and no input or attention crosses one. A document longer than the row goes on in the next row, as a new
    segment whose first input is the token before.

    What lies past the end of the stream, whole rows included, is padding: segment 0, weight 0, end-of-text.
    """

    def __init__(self, stream: TokenStream, context: int, end_of_text: int):
        self.stream, self.context, self.end_of_text = stream, context, end_of_text

    def __len__(self) -> int:
        return -(-len(self.stream) // self.context)

    def __getitem__(self, row: int) -> dict[str, Int32[np.ndarray, "T"] | Float32[np.ndarray, "T"]]:
        start = min(int(row) * self.context, len(self.stream))
        stop = min(start + self.context, len(self.stream))
        n = stop - start
        lengths = self._segment_lengths(start, stop)
        tokens, targets = np.full((2, self.context), self.end_of_text, np.int32)
        segment_ids, positions = np.zeros((2, self.context), np.int32)
        targets[:n] = self.stream.read(start, stop)
        tokens[1:n] = targets[: n - 1] if n else 0
        if n and start:
            tokens[0] = self.stream.read(start - 1, start)[0]
        segment_ids[:n] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        positions[:n] = np.arange(n) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        weights = (segment_ids > 0).astype(np.float32)
        return dict(tokens=tokens, targets=targets, segment_ids=segment_ids, positions=positions, weights=weights)

    def _segment_lengths(self, start: int, stop: int) -> np.ndarray:
        ends = self.stream.document_ends
        first, last = np.searchsorted(ends, start, "right"), np.searchsorted(ends, stop, "left")
        borders = np.concatenate([[start], ends[first:last], [stop]])
        return np.diff(borders)
