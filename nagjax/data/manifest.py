"""The manifest of a corpus names its shards, with the size and SHA-256 of every file."""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from nagjax.errors import UserError
from nagjax.json_reader import build
from nagjax.ranges import Range

ANEW = "delete the folder and prepare the corpus again"  # a finished corpus is never prepared over

FORMAT = 1
Size = Annotated[int, Range(ge=0, le=2**62)]


@dataclass(frozen=True)
class FileRecord:
    """A finished file: its name inside the corpus folder, size in bytes, and SHA-256."""

    name: str
    size: Size
    sha256: str

    def __post_init__(self):
        name = self.name
        if not isinstance(name, str) or name in ("", ".", "..") or name != Path(name).name:
            raise UserError("path", self.name, "a manifest names files of its own folder only: do not use this corpus")


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard. `exact` says that the tokenizer's byte table adds up to every document's true length."""

    tokens: FileRecord
    documents: FileRecord
    token_count: Size
    document_count: Size
    byte_count: Size
    exact: bool


@dataclass(frozen=True)
class Manifest:
    """The content of a corpus folder: `splits` maps each split's name to its shards, in order."""

    tokenizer_name: str
    tokenizer_fingerprint: str
    dtype: str
    source: dict
    splits: dict[str, list[ShardRecord]]

    def total(self, split: str, what: str) -> int:
        """Sum of `token_count`, `document_count` or `byte_count` over a split's shards."""
        return sum(getattr(shard, what) for shard in self.splits.get(split, ()))

    @property
    def content(self) -> str:
        """SHA-256 of everything that a reader sees: tokens, document boundaries and tokenizer."""
        shards = {
            name: [(shard.tokens.sha256, shard.documents.sha256) for shard in shards]
            for name, shards in sorted(self.splits.items())
        }
        return sha256(json.dumps([self.tokenizer_fingerprint, self.dtype, shards]).encode()).hexdigest()

    def to_json(self) -> dict:
        splits = {
            name: {
                **{key: self.total(name, key) for key in ("token_count", "document_count", "byte_count")},
                "shards": [asdict(shard) for shard in shards],
            }
            for name, shards in self.splits.items()
        }
        return {"format": FORMAT, **{k: v for k, v in vars(self).items() if k != "splits"}, "splits": splits}

    @classmethod
    def from_json(cls, data: Any) -> "Manifest":
        """Raises UserError naming the field that is missing or of the wrong type."""
        return build(cls, data, others=(cls,), made={"splits": _splits})


@dataclass(frozen=True)
class _Split:
    """A split as the file has it, without the totals."""

    shards: list[ShardRecord]


def _splits(found: Any, where: str) -> dict[str, list[ShardRecord]]:
    if not isinstance(found, dict):
        raise UserError(where, found, "must be one JSON object")
    return {name: build(_Split, own, f"{where}.{name}", others=(_Split,)).shards for name, own in found.items()}
