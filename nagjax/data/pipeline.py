"""From a corpus to batches: an endless shuffled stream for training, a finite exact pass for evaluation."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from jaxtyping import Float32

from nagjax.data.rows import Rows
from nagjax.data.stdlib import open_stdlib
from nagjax.data.storage import storage_path
from nagjax.data.store import SPLITS, TokenStream, open_stream, open_tokenizer, read_manifest, verify_small
from nagjax.data.tokenizer import Tokenizer, load_tokenizer
from nagjax.errors import UserError
from nagjax.ranges import Range, Seed, check_fields

if TYPE_CHECKING:
    import grain

STDLIB = "stdlib"
_BUFFERED_BATCHES = 4


@dataclass(frozen=True)
class DataConfig:
    """What to train on, and in which order."""

    path: str = STDLIB  # stdlib: the sources of this Python's standard library; or a folder made by nagjax data prepare
    tokenizer: str = "bytes"  # bytes or a tokenizer.json, for stdlib only: a prepared folder carries its own
    seed: Seed = 0  # order of the training rows; epochs differ in order
    workers: Annotated[int, Range(ge=0, le=256)] = 0  # processes that make the same batches; 0: a thread does
    shuffle: bool = True  # whether training rows are shuffled at all

    def __post_init__(self):
        check_fields(self, "data.")
        if not self.path:
            raise UserError("data.path", self.path, 'use "stdlib" or a folder made by "nagjax data prepare"')
        if self.path != STDLIB and self.tokenizer != "bytes":
            fix = "a prepared corpus carries its own tokenizer: leave this out, or prepare it again"
            raise UserError("data.tokenizer", self.tokenizer, fix)


@dataclass(frozen=True)
class Dataset:
    """One split of a corpus, opened: its token stream, tokenizer, and the configuration it came from.

    content: a hash of the whole corpus, both splits and the tokenizer."""

    config: DataConfig
    split: str
    tokenizer: Tokenizer
    stream: TokenStream
    content: str = ""

    @property
    def token_count(self) -> int:
        """Tokens of the split, the end-of-text token of each document included."""
        return len(self.stream)

    @property
    def document_count(self) -> int:
        return len(self.stream.document_ends)

    @property
    def byte_count(self) -> int:
        """UTF-8 bytes of the documents' text."""
        return int(self.stream.document_bytes.sum())

    def bytes_per_token(self) -> Float32[np.ndarray, "V"]:
        """Bytes of text each token id stands for, to be summed over the targets that count.

        Over a whole pass that sum is `byte_count` for every tokenizer. For byte-level ones each entry is
        exact; for others it is this split's mean. The end-of-text token stands for no bytes, but is
        predicted: its nats count, so bits per byte includes the cost of saying where documents end.
        """
        if self.stream.exact:
            if (table := self.tokenizer.token_bytes) is None:
                fix = "says that the tokenizer's bytes are exact, which they are not: prepare the corpus again"
                raise UserError("data.path", self.config.path, fix)
            return table.astype(np.float32)
        table = np.full(self.tokenizer.vocab_size, self.byte_count, np.float32)
        table /= max(1, self.token_count - self.document_count)
        table[self.tokenizer.end_of_text] = 0
        return table

    def rows(self, context: int) -> int:
        """Rows of `context` targets that one pass over the split takes."""
        return -(-self.token_count // context)


def open_dataset(config: DataConfig, *, split: str = "train", tokenizer: Tokenizer | None = None) -> Dataset:
    """Open `"train"` or `"validation"` of a corpus, without reading it (if it is small, its hashes are compared).

    `tokenizer`, when given, is used for `"stdlib"` in place of the configured one, and must be the corpus's
    own for a prepared folder. Raises UserError: unknown split, absent path, unknown or other tokenizer,
    missing or cut shards, a split with no documents.
    """
    if split not in SPLITS:
        raise UserError("split", split, f"use one of {', '.join(SPLITS)}")
    if config.path == STDLIB:
        tokenizer = tokenizer or load_tokenizer(config.tokenizer)
        stream, content = open_stdlib(split, tokenizer)
    else:
        folder = storage_path(config.path)
        manifest = read_manifest(folder)
        own = open_tokenizer(folder, manifest)
        if tokenizer is not None and tokenizer.fingerprint != own.fingerprint:
            raise UserError("tokenizer", tokenizer.name, f"{config.path} was prepared with {own.name}: use that")
        tokenizer, stream, content = own, open_stream(folder, manifest, split), manifest.content
        verify_small(folder, manifest, split)
    if not len(stream):
        fix = "holds no documents (a text file is one): prepare it again with more, another --validation, or --held-out"
        raise UserError("split", f"{config.path}/{split}", fix)
    return Dataset(config, split, tokenizer, stream, content)


def batches(
    dataset: Dataset,
    *,
    batch: int,
    context: int,
    repeat: bool = True,
    start: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> "grain.DatasetIterator":
    """Iterate over dicts of `tokens`, `targets`, `segment_ids`, `positions` (int32) and `weights` (float32),
    each `[batch / process_count, context]`; `segment_ids` count from 1 and are 0 in padding, `weights` are 1
    where the target counts (see `Rows`), positions restart at every segment.

    `repeat=True`: endless, every epoch in its own order, batches running over epoch borders, so that any
    `rows(context)` consecutive rows from a multiple of it are one whole epoch.
    `repeat=False`: one pass over all rows in one fixed scattered order whatever the seed, so that its first
    batches are a fair sample; the last batch is filled with padding rows. Always in this process.

    `start` batches are left out at the beginning, without being read: the stream is the one that has yielded them.

    `batch` is the global batch. Process p takes its p-th part: joining the processes' batches in order gives
    the batch of a single process, for any `process_count`. `get_state` / `set_state` (and orbax, to which the
    iterator is a checkpointable) restore the exact position; a state belongs to one number of `workers`.
    With `workers` > 0 a script needs the `if __name__ == "__main__"` guard, and `close()` ends the workers.

    Raises UserError for sizes below 1, a batch the processes cannot share, or less than one row to train on.
    """
    import grain

    for field, value in (("batch", batch), ("context", context), ("process_count", process_count)):
        if value < 1:
            raise UserError(field, value, "needs to be at least 1")
    if start < 0:
        raise UserError("start", start, "needs to be at least 0")
    if batch % process_count:
        raise UserError("batch", batch, f"needs to be a multiple of the {process_count} processes")
    if not 0 <= process_index < process_count:
        raise UserError("process_index", process_index, f"needs to be from 0 to {process_count - 1}")
    if repeat and dataset.token_count < context:
        fix = f"{dataset.split} has only {dataset.token_count} tokens, less than one row: lower it or add text"
        raise UserError("context", context, fix)

    rows, end = dataset.rows(context), dataset.tokenizer.end_of_text
    if repeat:
        source = grain.MapDataset.source(Rows(dataset.stream, context, end)).seed(dataset.config.seed)
        source = (source.shuffle() if dataset.config.shuffle else source).repeat()
    else:
        scattered = grain.MapDataset.range(rows).shuffle(seed=0)
        padding = grain.MapDataset.range(rows, -(-rows // batch) * batch)
        order = grain.MapDataset.concatenate([scattered, padding]) if len(padding) else scattered
        source = order.map(Rows(dataset.stream, context, end).__getitem__)
    # Batching before dividing is what keeps the global batch independent of the number of processes.
    local = source.batch(batch // process_count, drop_remainder=True)
    local = local[process_index + start * process_count :: process_count]
    workers = dataset.config.workers if repeat else 0
    threads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_BUFFERED_BATCHES)
    stream = local.to_iter_dataset(threads)
    if workers:
        _parse_absl_flags()
        options = grain.multiprocessing.MultiprocessingOptions(workers, per_worker_buffer_size=_BUFFERED_BATCHES)
        # Through pipes: shared memory is small in containers, and left behind when a process is killed.
        no_shared_memory = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
        stream = grain.experimental.WithOptionsIterDataset(stream, no_shared_memory).mp_prefetch(options)
    return iter(stream)


def _parse_absl_flags() -> None:
    """Grain 0.2.18 reads an absl flag when it starts workers, which fails unless absl's main ran."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
