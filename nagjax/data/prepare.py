"""Prepare a corpus: any documents into a folder of token shards, in bounded memory, restartable.

Work goes in rounds. A round collects documents until it has `shard_tokens` tokens, writes one shard for each
split that got any, and then records in `progress.json` how many documents of the input are behind it. A run
that was stopped (killed, disk full) continues after the last recorded round when started again.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from nagjax.data.documents import HUB_PREFIX, find_files, read_documents, split_name
from nagjax.data.encode import encode_documents
from nagjax.data.store import (
    MANIFEST,
    PROGRESS,
    SPLITS,
    Document,
    Manifest,
    ShardRecord,
    cannot_write,
    read_manifest,
    write_json,
    write_manifest,
    write_shard,
)
from nagjax.data.tokenizer import load_tokenizer
from nagjax.errors import UserError


def prepare(
    inputs: Sequence[str],
    out: str | os.PathLike,
    *,
    tokenizer: str = "bytes",
    validation: float = 0.05,
    held_out: Sequence[str] = (),
    field: str = "text",
    shard_tokens: int = 1 << 25,
) -> Manifest:
    """Tokenise documents into the corpus folder `out` and return its manifest.

    inputs: files (.txt, .md, .jsonl, each also .gz, .xz, .zst; .parquet), folders of them, or
    `hub:OWNER/NAME[#CONFIG][:SPLIT]`. tokenizer: `"bytes"` or a tokenizer.json. validation: the share of
    documents held out, chosen by hash. held_out: further inputs that go to validation whole; with them
    `validation` may be 0. field: where JSON lines, Parquet rows and hub rows keep their text. shard_tokens:
    tokens in one round, which also bounds the memory (about 5 bytes each).

    A finished `out` made from the same request is returned as it is. Raises UserError for bad input, for an
    `out` that holds something else, and when it cannot be written.
    """
    if not inputs:
        raise UserError("inputs", list(inputs), "name at least one file, folder or hub: dataset")
    if not 0 <= validation < 1:
        raise UserError("validation", validation, "use a share from 0 up to, not including, 1")
    if shard_tokens < 1:
        raise UserError("shard_tokens", shard_tokens, "needs to be at least 1")
    folder, encoder = Path(out), load_tokenizer(tokenizer)
    request = {
        "inputs": _described(inputs),
        "held_out": _described(held_out),
        "tokenizer": encoder.fingerprint,
        "validation": validation,
        "field": field,
        "shard_tokens": shard_tokens,
    }
    with cannot_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if manifest.source != request:
            raise UserError("out", str(folder), "holds another corpus already: choose another folder")
        return manifest
    progress = _resume(folder, request) or {"rounds": 0, "documents": 0, "splits": {}}

    def finish_round(pending: dict[str, list[Document]]) -> None:
        for name, documents in pending.items():
            if documents:
                shard = write_shard(folder, name, progress["rounds"], documents, encoder)
                progress["splits"].setdefault(name, []).append(asdict(shard))
                documents.clear()
        progress["rounds"] += 1
        write_json(folder, PROGRESS, {"request": request, **progress})

    pending, tokens = {name: [] for name in SPLITS}, 0
    texts = _labelled(inputs, held_out, validation, field)
    for split, document in encode_documents(islice(texts, progress["documents"], None), encoder):
        progress["documents"] += 1
        if document.byte_count:
            pending[split].append(document)
            tokens += len(document.ids) + 1
        if tokens >= shard_tokens:
            finish_round(pending)
            tokens = 0
    if tokens:
        finish_round(pending)
    if not progress["splits"]:
        raise UserError("inputs", list(inputs), "there is no text in them")
    splits = {n: [ShardRecord.from_json(s) for s in shards] for n, shards in progress["splits"].items()}
    manifest = write_manifest(folder, encoder, request, splits)
    for leftover in (folder / PROGRESS, *folder.glob(".*.partial")):
        leftover.unlink(missing_ok=True)
    return manifest


def _labelled(
    inputs: Sequence[str], held_out: Sequence[str], validation: float, field: str
) -> Iterator[tuple[str, str]]:
    for text in read_documents(inputs, field=field):
        yield text, split_name(text, validation)
    for text in read_documents(held_out, field=field):
        yield text, "validation"


def _described(inputs: Sequence[str]) -> list[list]:
    """Every input file with its size: enough to notice that a half-finished corpus was made from others."""
    hub = [[name, None] for name in inputs if name.startswith(HUB_PREFIX)]
    files = find_files([name for name in inputs if not name.startswith(HUB_PREFIX)])
    return hub + [[path.as_posix(), path.stat().st_size] for path in files]


def _resume(folder: Path, request: dict) -> dict | None:
    """The record of an unfinished run of the same request; None in a folder without one."""
    try:
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if progress.pop("request") != request:
        fix = "holds an unfinished corpus of another request: delete it, or choose another folder"
        raise UserError("out", str(folder), fix)
    return progress
