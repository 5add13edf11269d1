"""The tokens of a split as one sequence, whether its shards are mapped or in an object store."""

import contextlib
import errno
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
from jaxtyping import Bool, Int32, Int64

from nagjax.data.manifest import ANEW
from nagjax.data.storage import RemoteArray, RemotePath, StoragePath
from nagjax.errors import UserError

LARGEST = 2**40  # bytes of a document
FEW = 64  # maps that every process's limit on open files allows


@dataclass(frozen=True)
class ArrayFile:
    """An array in a file, which is mapped (in an object store: read by ranges) on first use.

    Copies of it (in worker processes) carry only the name.
    """

    path: StoragePath
    dtype: str
    shape: tuple[int, ...]

    @property
    def local(self) -> bool:
        return not isinstance(self.path, RemotePath)

    def open(self) -> np.ndarray | RemoteArray:
        if isinstance(self.path, RemotePath):
            if len(self.shape) == 1:
                return RemoteArray(self.path, self.dtype)
            return np.frombuffer(self.path.read_bytes(), self.dtype).reshape(self.shape)
        try:
            return np.memmap(self.path, self.dtype, "r", shape=self.shape)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            fix = "too many files are open in this process, each shard takes two: raise their limit, ulimit -n"
            raise UserError("data.path", str(self.path.parent), fix) from None


class TokenStream:
    """All tokens of a split as one sequence, document after document; random access by position.

    `shards` are pairs (tokens `[n]`, documents int64 `[d, 2]`) of arrays in memory or `ArrayFile`s, opened when first
    read. `exact` says that the tokenizer's byte table adds up to the true length of every document in them.
    `byte_count` is the sum over all documents, if it is known without reading their index.
    """

    def __init__(
        self,
        shards: Sequence[tuple[np.ndarray | ArrayFile, np.ndarray | ArrayFile]],
        exact: bool,
        byte_count: int | None = None,
    ):
        self._shards, self.exact, self._byte_count = list(shards), exact, byte_count
        self._starts = np.cumsum([0] + [tokens.shape[0] for tokens, _ in self._shards])
        self._firsts = np.cumsum([0] + [documents.shape[0] for _, documents in self._shards])
        self._begin()

    def _begin(self) -> None:
        """Sets the state in which no shard is open yet."""
        _allow_maps(sum(isinstance(array, ArrayFile) and array.local for pair in self._shards for array in pair))
        self._tokens: dict[int, np.ndarray | RemoteArray] = {}
        self._documents: dict[int, np.ndarray] = {}
        self._locks = [Lock() for _ in self._shards]  # one thread reads an index, the others wait

    @classmethod
    def joined(cls, streams: Sequence["TokenStream"]) -> "TokenStream":
        """The streams one after the other, as one stream."""
        shards = [shard for stream in streams for shard in stream._shards]
        known = [stream._byte_count for stream in streams]
        total = None if None in known else sum(n for n in known if n is not None)
        return cls(shards, all(stream.exact for stream in streams), total)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def remote(self) -> bool:
        """Whether any shard is read from an object store."""
        return any(isinstance(t, ArrayFile) and not t.local for t, _ in self._shards)

    @property
    def document_count(self) -> int:
        return int(self._firsts[-1])

    @property
    def byte_count(self) -> int:
        """UTF-8 bytes of the documents' text."""
        if self._byte_count is not None:
            return self._byte_count
        return sum(int(self._index(shard)[:, 1].sum()) for shard in range(len(self._shards)))

    def _read(self, shard: int, start: int, stop: int) -> np.ndarray:
        if shard not in self._tokens:
            self._tokens[shard] = _opened(self._shards[shard][0])
        return self._tokens[shard][start:stop]

    def _index(self, shard: int) -> Int64[np.ndarray, "documents 2"]:
        """The index of a shard, int64 `[documents, 2]`: where each document ends in it, increasing, and its bytes."""
        with self._locks[shard]:
            if shard not in self._documents:
                tokens, documents = self._shards[shard]
                found = _opened(documents)
                ends = found[:, 0]
                rising = ends.size and ends[0] > 0 and ends[-1] == tokens.shape[0] and (ends[1:] > ends[:-1]).all()
                if not (rising and (found[:, 1] >= 0).all() and found[:, 1].max() <= LARGEST):
                    name = documents.path if isinstance(documents, ArrayFile) else "documents"
                    fix = f"is damaged (its documents do not end where its tokens do): copy it again, or {ANEW}"
                    raise UserError("data.path", str(name), fix)
                self._documents[shard] = found
            return self._documents[shard]

    @property
    def document_ends(self) -> Int64[np.ndarray, "documents"]:
        """The position just after each document's end-of-text token, int64, increasing."""
        parts = [self._index(shard)[:, 0] + self._starts[shard] for shard in range(len(self._shards))]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def document(self, number: int) -> tuple[int, int]:
        """The positions at which a document begins and ends, including its end-of-text token."""
        shard = int(np.searchsorted(self._firsts, number, "right")) - 1
        ends, at = self._index(shard)[:, 0], number - int(self._firsts[shard])
        start = int(ends[at - 1]) if at else 0
        return start + int(self._starts[shard]), int(ends[at]) + int(self._starts[shard])

    def borders(self, start: int, stop: int) -> Int64[np.ndarray, "n"]:
        """`start`, every end of a document between, and `stop`, int64."""
        found, shard = [np.array([start])], int(np.searchsorted(self._starts, start, "right")) - 1
        while shard < len(self._shards) and (begin := int(self._starts[shard])) < stop:
            ends = self._index(shard)[:, 0]
            first, last = np.searchsorted(ends, start - begin, "right"), np.searchsorted(ends, stop - begin, "left")
            found.append(ends[first:last] + begin)
            shard += 1
        return np.concatenate([*found, [stop]])

    def read(self, start: int, stop: int) -> Int32[np.ndarray, "n"]:
        """The tokens `[start, stop)`, int32, across shards."""
        return self.read_counted(start, stop)[0]

    def read_counted(self, start: int, stop: int) -> tuple[Int32[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
        """The tokens `[start, stop)`, int32, and which of them count as targets, bool. In shards of a signed dtype,
        negative values do not count; in others all tokens do."""
        out, counted = np.empty(stop - start, np.int32), np.ones(stop - start, bool)
        shard = int(np.searchsorted(self._starts, start, "right")) - 1
        at = start
        while at < stop:
            until = min(stop, int(self._starts[shard + 1]))
            begin = int(self._starts[shard])
            here, found = slice(at - start, until - start), self._read(shard, at - begin, until - begin)
            out[here], counted[here] = found, found >= 0
            at, shard = until, shard + 1
        return np.where(counted, out, ~out), counted

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in ("_tokens", "_documents", "_locks")}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._begin()  # maps and open files cannot be pickled


def _allow_maps(count: int) -> None:
    """Raises this process's limit on open files by `count`, as far as it may: every map keeps its file open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if count < FEW or soft == resource.RLIM_INFINITY:
        return
    wanted = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
    with contextlib.suppress(ValueError, OSError):  # the system has its own limit, as on macOS
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _opened(array: np.ndarray | ArrayFile) -> np.ndarray | RemoteArray:
    return array.open() if isinstance(array, ArrayFile) else array
