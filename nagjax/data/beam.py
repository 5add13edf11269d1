"""Preparation of a corpus on Apache Beam, for corpora larger than a disk; shards and manifest equal those of a local
run.

There are two pipelines, with a plan between them. The first tokenises every input file on its own into `out/.beam`. The
plan walks through the lengths of all documents in order and cuts them into the rounds that the local run makes. The
second writes the shards of each round. Every piece of work leaves a file that appears only when it is complete, so that
a retry, or the same command after a stop, continues from there; `.beam` is emptied at the end.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from nagjax.data.documents import (
    LONGEST,
    Inputs,
    as_names,
    fingerprints,
    is_one_text,
    sources,
    split_documents,
)
from nagjax.data.encode import encode_documents
from nagjax.data.hub import pinned
from nagjax.data.preparation import Request, describe_request, finish
from nagjax.data.storage import RemoteArray, RemotePath, StoragePath
from nagjax.data.store import (
    PROGRESS,
    SPLITS,
    Document,
    Manifest,
    ShardRecord,
    cannot_write,
    read_own,
    write_file,
    write_json,
    write_shard,
)
from nagjax.data.stream import ArrayFile
from nagjax.data.tokenizer import Tokenizer
from nagjax.errors import UserError, renamed
from nagjax.files import refuse_link
from nagjax.json_reader import build, parse_json

STAGE = ".beam"


@dataclass(frozen=True)
class Work:
    """What every worker needs to know."""

    folder: StoragePath
    tokenizer: Tokenizer
    validation: float
    field: str
    longest: int = LONGEST
    one_text: bool = False  # the corpus is a single text file
    held_out: frozenset[bytes] = frozenset()  # fingerprints of held-out documents, which are left out of the inputs

    @property
    def stage(self) -> StoragePath:
        return self.folder / STAGE


@dataclass(frozen=True)
class Piece:
    """One input file or hub dataset, tokenised: `NAME.tokens`, int32 ids one document after the other, and
    `NAME.documents`, int64 [documents, 3]: split (index into SPLITS), number of ids, number of bytes. The second file
    is written last."""

    number: int
    source: str
    held_out: bool

    @property
    def done(self) -> str:
        return f"{self.number:06d}.documents"

    def make(self, work: Work) -> None:
        rows = []

        def ids() -> Iterator[np.ndarray]:
            share = 1.0 if self.held_out else work.validation
            by_place = work.one_text and not self.held_out
            apart = frozenset() if self.held_out else work.held_out
            reading = {"field": work.field, "longest": work.longest, "by_place": by_place, "without": apart}
            sides = split_documents([self.source], share, **reading)
            for split, document in encode_documents(sides, work.tokenizer):
                if document.byte_count:
                    rows.append((SPLITS.index(split), len(document.ids), document.byte_count))
                    yield np.ascontiguousarray(document.ids, "<i4")

        write_file(work.stage, f"{self.number:06d}.tokens", (part for part in ids() if part.size))
        write_file(work.stage, self.done, [np.array(rows, "<i8").reshape(-1)] if rows else [])

    def lengths(self, work: Work) -> np.ndarray:
        path = work.stage / self.done
        try:
            return np.frombuffer(path.read_bytes(), "<i8").reshape(-1, 3)
        except ValueError:
            raise UserError("out", str(path), "is damaged: delete it and start again") from None

    def documents(self, work: Work, start: int, stop: int) -> Iterator[tuple[str, Document]]:
        lengths = self.lengths(work)
        ends = np.concatenate([[0], np.cumsum(lengths[:, 1])])
        ids: np.ndarray | RemoteArray = np.zeros(0, "<i4")  # an empty file cannot be mapped
        if ends[-1]:
            ids = ArrayFile(work.stage / f"{self.number:06d}.tokens", "<i4", (int(ends[-1]),)).open()
        for i in range(start, stop):
            yield SPLITS[lengths[i, 0]], Document(ids[int(ends[i]) : int(ends[i + 1])], int(lengths[i, 2]))


@dataclass(frozen=True)
class Round:
    """One round's documents, as stretches (piece, start, stop); its result file names the shards that were written."""

    number: int
    stretches: tuple[tuple[Piece, int, int], ...]

    @property
    def done(self) -> str:
        return f"round-{self.number:06d}.json"

    def make(self, work: Work) -> None:
        pending: dict[str, list[Document]] = {name: [] for name in SPLITS}
        for piece, start, stop in self.stretches:
            for split, document in piece.documents(work, start, stop):
                pending[split].append(document)
        shards = {
            name: asdict(write_shard(work.folder, name, self.number, documents, work.tokenizer))
            for name, documents in pending.items()
            if documents
        }
        write_json(work.stage, self.done, shards)


def prepare_on_beam(
    inputs: Inputs,
    out: str | os.PathLike,
    *,
    tokenizer: str = "bytes",
    validation: float = 0.05,
    held_out: Inputs = (),
    field: str = "text",
    longest: int = LONGEST,
    shard_tokens: int = 1 << 25,
    options: Sequence[str] = (),
) -> Manifest:
    """Prepares a corpus as `prepare` does, on a Beam runner: takes the arguments of `prepare` except `progress` and
    `chat`, and Beam's own `options` (`--runner=DataflowRunner` ...).

    Without options it runs in this process. A worker holds in memory one round and the lengths of one input file; files
    are the unit of parallel work. On several machines `inputs` and `out` are paths that all of them see (`gs://`,
    `s3://`, a shared disk). Raises UserError as `prepare` does, and if Beam is not installed.
    """
    if not _installed():
        raise UserError("runner", "beam", "needs Apache Beam: pip install -c constraints-beam.txt -e '.[beam]'")
    inputs, held_out = pinned(as_names(inputs)), pinned(as_names(held_out))
    request = describe_request(inputs, out, tokenizer, validation, held_out, field, shard_tokens)
    if manifest := request.finished():
        return manifest
    apart = fingerprints(held_out, field=field, longest=longest)
    work = Work(request.folder, request.tokenizer, validation, field, longest, is_one_text(inputs), apart)
    if isinstance(work.stage, Path):
        refuse_link(work.stage)
    if request.progress("beam") is None:
        _empty(work.stage)  # its files may belong to another request
        write_json(request.folder, PROGRESS, {"request": request.source, "runner": "beam"})
    with cannot_write(work.folder):
        work.stage.mkdir(parents=True, exist_ok=True)
    pieces = [
        Piece(number, source, held)
        for number, (source, held) in enumerate(
            [(str(s), False) for s in sources(inputs)] + [(str(s), True) for s in sources(held_out)]
        )
    ]
    _run(pieces, work, options)
    rounds = plan(pieces, work, shard_tokens)
    if not rounds:
        raise UserError("inputs", inputs, "there is no text in them")
    _run(rounds, work, options)
    return _gather(request, work, rounds)


def _empty(stage: StoragePath) -> None:
    if stage.is_dir():
        for file in list(stage.files() if isinstance(stage, RemotePath) else stage.iterdir()):
            file.unlink(missing_ok=True)


def plan(pieces: Sequence[Piece], work: Work, shard_tokens: int) -> list[Round]:
    """The rounds of the local run: a round ends with the document that brings it to `shard_tokens` tokens."""
    rounds, stretches, tokens = [], [], 0
    for piece in pieces:
        totals = np.cumsum(piece.lengths(work)[:, 1] + 1)
        start, behind = 0, 0
        while start < len(totals):
            stop = min(int(np.searchsorted(totals, shard_tokens - tokens + behind)) + 1, len(totals))
            tokens += int(totals[stop - 1]) - behind
            stretches.append((piece, start, stop))
            start, behind = stop, int(totals[stop - 1])
            if tokens >= shard_tokens:
                rounds.append(Round(len(rounds), tuple(stretches)))
                stretches, tokens = [], 0
    return [*rounds, Round(len(rounds), tuple(stretches))] if stretches else rounds


def _run(todo: Sequence[Piece] | Sequence[Round], work: Work, options: Sequence[str]) -> None:
    """Makes what does not exist yet, on the runner. Raises the UserError that a worker raised."""
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

    todo = [one for one in todo if not (work.stage / one.done).exists()]
    if not todo:
        return
    # Beam's own default may fetch a runner from the network; this one is in the package.
    options = list(options) or ["--runner=FnApiRunner"]
    with beam.Pipeline(options=PipelineOptions(options)) as pipeline:
        _ = pipeline | beam.Create(todo) | beam.Reshuffle() | beam.Map(_make, work)
    for one in todo:
        error = work.stage / f"{one.done}.error"
        if not (work.stage / one.done).exists():
            told = build(_Told, parse_json(read_own(error)))
            raise UserError(told.field, told.value, told.fix)


def _make(one: Piece | Round, work: Work) -> None:
    """Makes one piece or round. A UserError would recur at every retry, so it is written down for the process that
    started the run."""
    if (work.stage / one.done).exists():
        return
    error = f"{one.done}.error"
    try:
        with renamed("data.path", "out"):  # as what reads arrays in a store names it
            one.make(work)
        (work.stage / error).unlink(missing_ok=True)
    except UserError as met:
        write_json(work.stage, error, {"field": met.field, "value": str(met.value), "fix": met.fix})


def _gather(request: Request, work: Work, rounds: Sequence[Round]) -> Manifest:
    splits: dict[str, list[ShardRecord]] = {}
    for one in rounds:
        for name, shard in _written(work.stage / one.done).items():
            splits.setdefault(name, []).append(shard)
    manifest = finish(request, splits)
    _empty(work.stage)
    if isinstance(work.stage, Path):
        work.stage.rmdir()
    return manifest


@dataclass(frozen=True)
class _Told:
    """The error that a worker raised."""

    field: str
    value: str
    fix: str


def _written(path: StoragePath) -> dict[str, ShardRecord]:
    try:
        shards = parse_json(read_own(path))
        return {name: build(ShardRecord, shards[name], name) for name in SPLITS if name in shards}
    except (OSError, ValueError, TypeError, UserError) as error:
        raise UserError("out", str(path), f"cannot be read ({error}): delete it and start again") from None


def _installed() -> bool:
    from importlib.util import find_spec

    return find_spec("apache_beam") is not None
