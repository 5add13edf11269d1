"""From corpora to batches: an endless shuffled stream for training, a finite exact pass for evaluation."""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from jaxtyping import Float32

from nagjax.data.manifest import ANEW
from nagjax.data.rows import DocumentRows, Rows, WholeRows
from nagjax.data.shares import Apportionment, mean_shares, names_of, parse_mix
from nagjax.data.stdlib import STDLIB, open_stdlib
from nagjax.data.storage import storage_path
from nagjax.data.store import SPLITS, open_stream, open_tokenizer, read_manifest
from nagjax.data.stream import TokenStream
from nagjax.data.tokenizer import Tokenizer, load_tokenizer, opening_of
from nagjax.data.workers import begin
from nagjax.errors import UserError, renamed
from nagjax.ranges import Range, Seed, check_fields, check_value

if TYPE_CHECKING:
    import grain

_BUFFERED_BATCHES = 4
_REMOTE_BATCHES = 16  # batches read at once, and ahead, from an object store, where every read has to wait


@dataclass(frozen=True)
class DataConfig:
    """What to train on, and in which order."""

    # stdlib: the source code of this Python's standard library; or a folder made by nagjax data prepare, which may be
    # in an object store: gs://, s3://, hub:OWNER/NAME
    path: str = STDLIB
    tokenizer: str = "bytes"  # bytes, or a tokenizer.json; for stdlib only, as a prepared folder has its own
    seed: Seed = 0  # random seed of the order of training rows, which differs between epochs
    workers: Annotated[int, Range(ge=0, le=256)] = 0  # processes that make batches, which stay the same; 0: a thread
    shuffle: bool = True  # shuffle the training rows
    # several corpora in place of data.path, each as PATH=WEIGHT, or as PATH=WEIGHT@SHARE,WEIGHT@SHARE for a weight that
    # changes over training; weights are shares of the rows
    mix: tuple[str, ...] = ()
    # packed: documents one after another, cut at the ends of rows; whole: whole documents only, except that one longer
    # than a row is cut off; document: one document per row, cut off or padded
    rows: Literal["packed", "whole", "document"] = "packed"

    def __post_init__(self):
        check_fields(self, "data.")
        if not self.path:
            raise UserError("data.path", self.path, 'use "stdlib" or a folder made by "nagjax data prepare"')
        if self.mix and self.path != STDLIB:
            fix = "a mixture's corpora all stand in data.mix: add this one there with a weight, or leave it out"
            raise UserError("data.path", self.path, fix)
        paths = [part.path for part in parse_mix(self.mix)] or [self.path]
        if STDLIB not in paths and self.tokenizer != "bytes":
            fix = "a prepared corpus carries its own tokenizer: leave this out, or prepare it again"
            raise UserError("data.tokenizer", self.tokenizer, fix)


@dataclass(frozen=True)
class Dataset:
    """One split of a corpus: its token stream, its tokenizer, and the config that it was opened with.

    content: a hash of the whole corpus, that is, both splits and the tokenizer. chat_template, template_tokens: those
    with which conversations were prepared (`nagjax.data.chat_template`).
    """

    config: DataConfig
    split: str
    tokenizer: Tokenizer
    stream: TokenStream
    content: str = ""
    chat_template: str = ""
    template_tokens: dict[str, str] = field(default_factory=dict)

    @property
    def token_count(self) -> int:
        """Tokens of the split, including the end-of-text token of each document."""
        return len(self.stream)

    @property
    def document_count(self) -> int:
        return self.stream.document_count

    @property
    def byte_count(self) -> int:
        """UTF-8 bytes of the documents' text."""
        return self.stream.byte_count

    def bytes_per_token(self) -> Float32[np.ndarray, "V"]:
        """The bytes of text that each token id stands for, float32, to be summed over the targets that count.

        Over a whole pass that sum is `byte_count`, if all targets count and no document is cut. For byte-level
        tokenizers each entry is exact; for others it is the mean over this split. The end-of-text token stands for no
        bytes, but is predicted: its nats count, so bits per byte include the cost of predicting where documents end.
        """
        if self.stream.exact:
            if (table := self.tokenizer.token_bytes) is None:
                fix = f"says that the tokenizer's bytes are exact, which they are not: {ANEW}"
                raise UserError("data.path", self.config.path, fix)
            return table.astype(np.float32)
        table = np.full(self.tokenizer.vocab_size, self.byte_count, np.float32)
        table /= max(1, self.token_count - self.document_count)
        table[self.tokenizer.end_of_text] = 0
        return table

    def rows(self, context: int) -> int:
        """The number of rows of `context` targets in one pass over the split."""
        return -(-self.token_count // context) if self.config.rows == "packed" else len(self.source(context))

    def waste(self, context: int) -> tuple[float, float]:
        """The share of the positions in rows that is padding, and the share of the tokens that is cut off."""
        if self.config.rows == "packed":
            return 1.0 - self.token_count / max(1, self.rows(context) * context), 0.0
        kept = int(np.minimum(np.diff(self.stream.document_ends, prepend=0), context).sum())
        return 1.0 - kept / max(1, self.rows(context) * context), 1.0 - kept / max(1, self.token_count)

    def source(self, context: int) -> Rows:
        """The rows of the split, by number."""
        kinds = {"packed": Rows, "whole": WholeRows, "document": DocumentRows}
        end = self.tokenizer.end_of_text
        return kinds[self.config.rows](self.stream, context, end, opening_of(self.tokenizer))


@dataclass(frozen=True)
class Mixture(Dataset):
    """One split of several corpora; `stream` joins theirs, one after the other."""

    corpora: tuple[Dataset, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the corpora in logs."""
        return names_of(parse_mix(self.config.mix))

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each corpus in all rows of the training."""
        return mean_shares(parse_mix(self.config.mix))

    def rows(self, context: int) -> int:
        return sum(corpus.rows(context) for corpus in self.corpora)

    def turns(self, batch: int, context: int) -> list[tuple[int, int]]:
        """The batches of one pass over all corpora, as (corpus, number): one of each corpus in turn, as long as it has
        any."""
        counts = [-(-corpus.rows(context) // batch) for corpus in self.corpora]
        rounds = itertools.zip_longest(*([(i, n) for n in range(count)] for i, count in enumerate(counts)))
        return [turn for found in rounds for turn in found if turn is not None]


def open_dataset(config: DataConfig, *, split: str = "train", tokenizer: Tokenizer | None = None) -> Dataset:
    """Opens `"train"` or `"validation"` of a corpus without reading it (the hashes of a small one are compared); with
    `mix`, those of several corpora, as a `Mixture`.

    `tokenizer`, if given, replaces the configured one for `"stdlib"`; for a prepared folder it must equal the corpus's
    own. Raises UserError for an unknown split, a missing path, an unknown or different tokenizer, missing or cut
    shards, a split without documents, and corpora of a mixture with different tokenizers.
    """
    check_value("config", config, DataConfig, "for a folder DataConfig(path=...)")
    if split not in SPLITS:
        raise UserError("split", split, f"use one of {', '.join(SPLITS)}")
    if config.mix:
        with renamed("data.path", "data.mix"):
            return _open_mixture(config, split, tokenizer)
    with renamed("path", "data.path"):
        return _open_one(config, split, tokenizer)


def _open_one(config: DataConfig, split: str, tokenizer: Tokenizer | None) -> Dataset:
    template, tokens = "", {}
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
        template, tokens = str(manifest.source.get("template") or ""), manifest.source.get("template_tokens") or {}
    if not len(stream):
        fix = "prepare another folder from more documents, with another --validation, or with --held-out"
        raise UserError("path", config.path, f"its {split} split holds no documents: {fix}")
    return Dataset(config, split, tokenizer, stream, content, template, tokens)


def _open_mixture(config: DataConfig, split: str, tokenizer: Tokenizer | None) -> Mixture:
    corpora = []
    for number, part in enumerate(parse_mix(config.mix)):
        # Each corpus has its own seed: else corpora of equal length would be read in the same order.
        seed = int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0])
        own = config.tokenizer if part.path == STDLIB else "bytes"
        alone = replace(config, path=part.path, tokenizer=own, seed=seed, mix=())
        corpora.append(open_dataset(alone, split=split, tokenizer=tokenizer))
    first = corpora[0]
    for other in corpora:
        if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
            names = [f"{c.config.path} has {c.tokenizer.name} ({c.tokenizer.fingerprint[:8]})" for c in (first, other)]
            fix = "a mixture has one tokenizer: prepare one of the two again with that of the other (--tokenizer)"
            if STDLIB in (first.config.path, other.config.path):
                fix = f"a mixture has one tokenizer: read {STDLIB} with that of the other (--data.tokenizer tok.json)"
            raise UserError("data.mix", " and ".join(names), fix)
    stream = TokenStream.joined([corpus.stream for corpus in corpora])
    content = sha256("".join(corpus.content for corpus in corpora).encode()).hexdigest()
    chat = next((corpus for corpus in corpora if corpus.chat_template), first)
    told = chat.chat_template, chat.template_tokens
    return Mixture(config, split, first.tokenizer, stream, content, *told, tuple(corpora))


class MixedRows:
    """The rows of a training on a mixture, by number. Each corpus is read in its own order, epoch after epoch."""

    def __init__(self, mixture: Mixture, context: int, rows: int | None):
        parts = parse_mix(mixture.config.mix)
        self.apportionment = Apportionment(parts, rows)
        self.corpora = [
            _endless(corpus, context) if share else None
            for share, corpus in zip(mean_shares(parts), mixture.corpora, strict=True)
        ]

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        corpus, number = self.apportionment.place(int(row))
        return self.corpora[corpus][number]


class Turns:
    """The batches of one pass over a mixture, split into the processes' parts; the parts of a batch are adjacent."""

    def __init__(self, turns: Sequence[tuple[int, int]], parts: Sequence[Any], process_count: int):
        self.turns, self.parts, self.process_count = turns, parts, process_count

    def __len__(self) -> int:
        return len(self.turns) * self.process_count

    def __getitem__(self, place: int) -> dict[str, np.ndarray]:
        turn, process = divmod(int(place), self.process_count)
        corpus, number = self.turns[turn]
        return self.parts[corpus][number * self.process_count + process]


def batches(
    dataset: Dataset,
    *,
    batch: int,
    context: int,
    repeat: bool = True,
    start: int = 0,
    steps: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> "grain.DatasetIterator":
    """Iterates over dicts of `tokens`, `targets`, `segment_ids`, `positions` (int32) and `weights` (float32), each
    `[batch / process_count, context]`. `segment_ids` count from 1 and are 0 in padding, `weights` are 1 where the
    target counts and else 0 (see `Rows`), and positions restart at 0 in every segment.

    `repeat=True`: endless, every epoch in its own order. Batches run across the ends of epochs, so that any
    `rows(context)` consecutive rows from a multiple of it are one whole epoch. `repeat=False`: one pass over all rows,
    in one fixed scattered order whatever the seed, so that its first batches are a fair sample. The last batch is
    filled with padding rows. Runs in this process, without workers.

    Of a mixture with `repeat`, every corpus has its own epochs, and its weight in `mix` is its share of the rows;
    `steps` is the length of the whole training, over which weights change (None: their mean holds throughout). Without
    `repeat` every batch comes from one corpus (`Mixture.turns`).

    `start`: the number of batches to skip, without reading them; the stream then continues as if it had yielded them.

    `batch` is the global batch. Process p takes its p-th part: joining the processes' batches in order gives the batch
    of a single process, for any `process_count`. `get_state` and `set_state` (and orbax, which can checkpoint the
    iterator) restore the exact position; a state is valid only for the same number of `workers`. With `workers` > 0 a
    script needs the `if __name__ == "__main__"` guard, and `close()` ends the workers.

    Raises UserError for sizes below 1, a batch that the processes cannot share, or less than one row to train on.
    """
    import grain

    for name, value in (("batch", batch), ("context", context), ("process_count", process_count)):
        if value < 1:
            raise UserError(name, value, "needs to be at least 1")
    if start < 0:
        raise UserError("start", start, "needs to be at least 0")
    if batch % process_count:
        raise UserError("batch", batch, f"needs to be a multiple of the {process_count} processes")
    if not 0 <= process_index < process_count:
        raise UserError("process_index", process_index, f"needs to be from 0 to {process_count - 1}")

    # Batching before dividing keeps the global batch independent of the number of processes.
    mine = batch // process_count
    if not isinstance(dataset, Mixture):
        source = _endless(dataset, context) if repeat else _one_pass(dataset, batch, context)
        local = source.batch(mine, drop_remainder=True)
    elif repeat:
        mixed = MixedRows(dataset, context, steps and steps * batch)
        local = grain.MapDataset.source(mixed).batch(mine, drop_remainder=True)
    else:
        parts = [_one_pass(corpus, batch, context).batch(mine) for corpus in dataset.corpora]
        local = grain.MapDataset.source(Turns(dataset.turns(batch, context), parts, process_count))
    local = local[process_index + start * process_count :: process_count]
    workers = dataset.config.workers if repeat else 0
    ahead = _REMOTE_BATCHES if dataset.stream.remote else _BUFFERED_BATCHES
    threads = grain.ReadOptions(num_threads=ahead if dataset.stream.remote else 1, prefetch_buffer_size=ahead)
    stream = local.to_iter_dataset(threads)
    if workers:
        _parse_absl_flags()
        options = grain.multiprocessing.MultiprocessingOptions(workers, per_worker_buffer_size=_BUFFERED_BATCHES)
        # Through pipes: shared memory is small in containers, and stays behind when a process is killed.
        no_shared_memory = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
        stream = grain.experimental.WithOptionsIterDataset(stream, no_shared_memory)
        stream = stream.mp_prefetch(options, worker_init_fn=begin)
    return iter(stream)


def _endless(dataset: Dataset, context: int) -> "grain.MapDataset":
    """All rows of a corpus, epoch after epoch."""
    import grain

    if dataset.config.rows == "packed" and dataset.token_count < context:
        where = f"{dataset.split} of {dataset.config.path}"
        fix = f"{where} has only {dataset.token_count} tokens, less than one row: lower it or add text"
        raise UserError("context", context, fix)
    source = grain.MapDataset.source(dataset.source(context)).seed(dataset.config.seed)
    return (source.shuffle() if dataset.config.shuffle else source).repeat()


def _one_pass(dataset: Dataset, batch: int, context: int) -> "grain.MapDataset":
    """All rows of a corpus once, then padding rows that fill the last batch."""
    import grain

    rows = dataset.rows(context)
    scattered = grain.MapDataset.range(rows).shuffle(seed=0)
    padding = grain.MapDataset.range(rows, -(-rows // batch) * batch)
    order = grain.MapDataset.concatenate([scattered, padding]) if len(padding) else scattered
    return order.map(dataset.source(context).__getitem__)


def _parse_absl_flags() -> None:
    """Marks absl's flags as parsed. Grain 0.2.18 reads one when it starts workers, which fails unless absl's main has
    run."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
