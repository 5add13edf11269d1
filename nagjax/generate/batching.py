"""Generates for texts of different lengths in one batch: which window of each text the model reads, which rows are
done, and when done rows leave the batch."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int32

from nagjax.generate.choose import Sampling
from nagjax.generate.decode import Pass, Rows, draw, empty, keep, place, read, write
from nagjax.train.distributed.mesh import batch_parts
from nagjax.train.score import STEP, padded

ROUND = 64  # tokens between two checks for rows that are done
OFTEN = 16  # the same, if the caller has to be asked
NOTHING_ENDS = np.array([-1], np.int32)  # no token has this id

Finished = Callable[[int, list[int]], bool]


@dataclasses.dataclass
class Row:
    """A text: the ids of its prompt and of what was generated, how many of them are the prompt, and the index of the
    first id that the model sees."""

    index: int
    ids: list[int]
    prompt: int
    start: int
    done: bool = False

    @property
    def window(self) -> list[int]:
        return self.ids[self.start :]

    @property
    def new(self) -> list[int]:
        return self.ids[self.prompt :]


def window_start(tokens: int, context: int) -> int:
    """The index of the first of `tokens` ids that the model sees: 0 while all fit into the context, then the smallest
    multiple of half a context that leaves at most a context. So the model sees between half a context and a whole one,
    and what it sees depends only on the number of tokens, not on how many of them were the prompt."""
    half = max(context // 2, 1)
    return half * max(math.ceil((tokens - context) / half), 0)


def slots_of(longest: int, tokens: int, context: int) -> int:
    """The number of slots, in tokens, of a batch's cache, if its longest window has `longest` tokens and `tokens` new
    ones follow."""
    return min(-(-(padded(longest, context) + tokens) // STEP) * STEP, context)


class Writer:
    """Generates for the rows of a batch together. It compiles once per number of rows and padded length that are read,
    and once per number of rows that are generated for; the latter is halved when enough rows are done.

    With `fixed`, every row keeps its place in the batch throughout, because the draws of a random router depend on it.
    """

    def __init__(
        self, params: nnx.State, graph: nnx.GraphDef, given: Pass, mesh: Mesh | None, context: int, fixed: bool = False
    ):
        self.params, self.given, self.context, self.fixed = params, given, context, fixed
        self.static = {"graph": graph, "mesh": mesh}
        self.parts = batch_parts(mesh.shape) if mesh else 1

    def write(
        self,
        rows: list[Row],
        tokens: int,
        key: jax.Array,
        sampling: Sampling,
        ends: Int32[np.ndarray, " E"],
        finished: Finished | None,
    ) -> None:
        """Appends up to `tokens` ids to every row. A row ends early at an id in `ends`, which is not appended, or when
        `finished` returns true; `finished` is called every few tokens with the row's index and its new ids."""
        slots = slots_of(max(len(row.window) for row in rows), tokens, self.context)
        keys = np.asarray(jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(len(rows)))))
        batch = list(rows) if self.fixed else sorted(rows, key=lambda row: len(row.window))
        batch += batch[-1:] * (-len(batch) % self.parts)
        state, drawn = self._read(None, batch, range(len(batch)), slots), 0
        while True:
            live = [row for row in rows if not row.done]
            done = np.array([row.done for row in batch])
            own = keys[[row.index for row in batch]]
            # The last token is drawn but not read, because nothing follows it. A token behind a full window is read to
            # no effect: the cache has no slot for it, and the window is read anew afterwards.
            limit = min(tokens - 1 - drawn, OFTEN if finished else ROUND)
            limit = min(limit, *(self.context + 1 - len(row.window) for row in live))
            if limit == 0:
                last = state.logits, own, np.int32(drawn), done, sampling, ends
                new = draw(*last, mesh=self.static["mesh"])
            else:
                new, state = write(
                    self.params,
                    state,
                    np.array([len(row.window) for row in batch], np.int32),
                    done,
                    own,
                    np.int32(drawn),
                    np.int32(limit),
                    sampling,
                    ends,
                    self.given,
                    room=ROUND,
                    **self.static,
                )
            count = max(limit, 1)
            drawn += count
            self._take(batch, jax.device_get(new)[:, :count].tolist(), {*ends.tolist()}, finished)
            if drawn == tokens or all(row.done for row in rows):
                return
            state, batch = self._compact(state, batch)
            full = (i for i, row in enumerate(batch) if len(row.window) > self.context)
            moved = [i for i in full if self.fixed or not batch[i].done]
            for i in moved:
                batch[i].start = window_start(len(batch[i].ids), self.context)
            state = self._read(state, batch, moved, slots) if moved else state

    def _take(self, batch: list[Row], written: list[list[int]], ends: set[int], finished: Finished | None) -> None:
        first = {id(row): (row, new) for row, new in zip(reversed(batch), reversed(written), strict=True)}
        for row, new in first.values():  # the others are copies that fill the batch
            if not row.done:
                kept = list(itertools.takewhile(lambda i: i not in ends, new))
                row.ids += kept
                row.done = len(kept) < len(new) or (finished is not None and finished(row.index, row.new))

    def _compact(self, state: Rows, batch: list[Row]) -> tuple[Rows, list[Row]]:
        """Halves the batch as often as the rows that are not done still fit into it."""
        live, size = [i for i, row in enumerate(batch) if not row.done], len(batch)
        while not self.fixed and size % (2 * self.parts) == 0 and len(live) <= size // 2:
            size //= 2
        if size == len(batch):
            return state, batch
        rest = (i for i, row in enumerate(batch) if row.done)
        kept = [*live, *(next(rest) for _ in range(size - len(live)))]
        return keep(state, np.array(kept)), [batch[i] for i in kept]

    def _read(self, state: Rows | None, batch: list[Row], which: Iterable[int], slots: int) -> Rows:
        """The state after the windows of these rows were read anew; windows of similar lengths are read together."""
        groups: dict[int, list[int]] = defaultdict(list)
        for i in which if not self.fixed else ():
            groups[padded(len(batch[i].window), self.context)].append(i)
        if self.fixed:
            groups[padded(max(len(row.window) for row in batch), self.context)] = list(range(len(batch)))
        for length, members in sorted(groups.items()):
            members += members[-1:] * (-len(members) % self.parts)
            texts = np.zeros((len(members), length), np.int32)
            for line, i in zip(texts, members, strict=True):
                line[: len(batch[i].window)] = batch[i].window
            lengths = np.array([len(batch[i].window) for i in members], np.int32)
            new = read(self.params, texts, lengths, self.given, slots=slots, **self.static)
            if members == list(range(len(batch))):
                return new
            if state is None:
                state = empty(graph=self.static["graph"], params=self.params, batch=len(batch), slots=slots)
            state = place(state, new, np.array(members))
        assert state is not None
        return state


def rows_of(prompts: Sequence[list[int]], context: int) -> list[Row]:
    return [Row(i, list(ids), len(ids), window_start(len(ids), context)) for i, ids in enumerate(prompts)]
