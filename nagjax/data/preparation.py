"""Prepares a corpus: turns documents into a folder of token shards, in bounded memory, and can be restarted.

Work goes in rounds. A round collects documents until it has `shard_tokens` tokens, writes one shard for each split that
got any, and then records in `progress.json` how many documents of the input are done. A run that was stopped (killed,
disk full) continues after the last recorded round when started again.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import file_digest
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from nagjax.data.chat_template import ChatTemplate
from nagjax.data.conversation import conversation_of
from nagjax.data.documents import (
    HUB_PREFIX,
    LONGEST,
    Field,
    Inputs,
    as_names,
    fingerprints,
    is_one_text,
    read_documents,
    sources,
    split_documents,
)
from nagjax.data.encode import encode_conversations, encode_documents
from nagjax.data.hub import HubDataset, pinned
from nagjax.data.manifest import Size
from nagjax.data.storage import RemotePath, StoragePath, reached, size_of, storage_path
from nagjax.data.store import (
    COUNTED_TYPE,
    MANIFEST,
    PROGRESS,
    SPLITS,
    TOKENIZER,
    Document,
    Manifest,
    ShardRecord,
    abandoned,
    cannot_write,
    check_files,
    open_stream,
    open_tokenizer,
    read_manifest,
    read_own,
    saved_tokenizer,
    write_json,
    write_manifest,
    write_shard,
)
from nagjax.data.tokenizer import Tokenizer, load_tokenizer
from nagjax.errors import UserError, renamed
from nagjax.json_reader import build, parse_json

_INPUTS = ("inputs", "held_out")


@dataclass
class Progress:
    """The content of progress.json; `documents` counts the documents of the input in the completed rounds."""

    request: dict
    runner: str = "local"
    rounds: Size = 0
    documents: Size = 0
    splits: dict[str, list[ShardRecord]] = dataclasses.field(default_factory=dict)


class Request(NamedTuple):
    """What is to be prepared, and where. `source` is the part of the request that the manifest stores."""

    folder: StoragePath
    tokenizer: Tokenizer
    source: dict
    states: dict[Path, tuple[int, ...]]  # of the inputs on this machine, when their content was hashed

    def finished(self) -> Manifest | None:
        """The corpus of this same request, if it exists; else None. Raises UserError if another corpus is in its place,
        or if a file of it is missing or damaged."""
        with reached(self.folder, "out"):
            if not (self.folder / MANIFEST).exists():
                return None
        with renamed("path", "out"):
            manifest = read_manifest(self.folder)
            if other := _difference(manifest.source, self.source):
                fix = f"holds another corpus already ({other}): choose another folder"
                raise UserError("out", str(self.folder), fix)
            open_tokenizer(self.folder, manifest)
            for split in manifest.splits:
                open_stream(self.folder, manifest, split)
        _remove_leftovers(self.folder)
        return manifest

    def progress(self, runner: str) -> "Progress | None":
        """The record of an unfinished run of the same request by the same runner; None if the folder has none. Raises
        UserError for a record of another request or runner, for a shard that is missing or cut, and for a
        tokenizer.json of another tokenizer, which the corpus would replace."""
        data = None
        try:
            data = parse_json(read_own(self.folder / PROGRESS))
            found = build(Progress, data)
        except FileNotFoundError:
            self._refuse_other_tokenizer()
            return None
        except (OSError, ValueError, UserError) as error:
            if isinstance(error, UserError) and error.field == "file":  # a link
                raise
            if data is not None and not (isinstance(data, dict) and "request" in data):
                fix = f"its {PROGRESS} is not that of a corpus: choose another folder"
                raise UserError("out", str(self.folder), fix) from None
            fix = f"cannot be read ({error}): delete it and prepare the corpus anew, or choose another folder"
            raise UserError("out", str(self.folder / PROGRESS), fix) from None
        if other := _difference(found.request, self.source):
            fix = f"holds an unfinished corpus of another request ({other}): delete it, or choose another folder"
            raise UserError("out", str(self.folder), fix)
        if found.runner != runner:
            fix = f"was begun with --runner {found.runner}: go on with that, or delete it"
            raise UserError("out", str(self.folder), fix)
        _check_shards(self.folder, found.splits)
        return found

    def _refuse_other_tokenizer(self) -> None:
        if self.tokenizer.to_json() is None or not (self.folder / TOKENIZER).exists():
            return
        try:
            there = saved_tokenizer(self.folder, self.tokenizer.name).fingerprint
        except (OSError, ValueError, UserError):
            there = None
        if there != self.tokenizer.fingerprint:
            fix = f"its {TOKENIZER} is another one, and would be replaced: choose another folder"
            raise UserError("out", str(self.folder), fix)

    def check_inputs(self) -> None:
        """Raises UserError if an input on this machine has changed since its content was hashed."""
        for path, state in self.states.items():
            if not path.exists() or _state(path) != state:
                fix = "changed while it was read, so OUT holds a mixture of old and new: delete OUT and start again"
                raise UserError("inputs", str(path), fix.replace("OUT", str(self.folder)))


def prepare(
    inputs: Inputs,
    out: str | os.PathLike,
    *,
    tokenizer: str = "bytes",
    validation: float = 0.05,
    held_out: Inputs = (),
    field: str = "text",
    longest: int = LONGEST,
    shard_tokens: int = 1 << 25,
    progress: Callable[[int, int], None] | None = None,
    chat: ChatTemplate | None = None,
) -> Manifest:
    """Tokenises documents into the corpus folder `out` and returns its manifest.

    inputs: files (.txt, .md, .jsonl, each also .gz, .xz, .zst; .parquet), folders of them, or
    `hub:OWNER/NAME[@REVISION][#CONFIG][:SPLIT]`, read at one commit, which the manifest records. tokenizer: `"bytes"`
    or a tokenizer.json. validation: the share of documents held out, chosen by hash; a text file is held out as a whole
    or not at all, but if it is the only input, its end is held out. held_out: further inputs, all of which go to
    validation; documents of `inputs` that are among them are left out, so that none is trained on. With these,
    `validation` may be 0. field: the field that holds the text in JSON lines, Parquet rows and hub rows; with a "?"
    behind its name, rows without a text are left out. longest: the most characters of one such line or row.
    shard_tokens: tokens in one round, which also bounds the memory (about 5 bytes each). progress: called after each
    document with the numbers of documents and tokens so far. chat: the inputs hold conversations
    (`nagjax.data.conversation`), which become text by this template; only the answers count as targets.

    If `out` is the finished corpus of the same request, it is returned unchanged. Raises UserError for bad input, for
    an `out` that holds something else or whose files are missing or damaged, and if it cannot be written.
    """
    inputs, held_out = pinned(as_names(inputs)), pinned(as_names(held_out))
    request = describe_request(inputs, out, tokenizer, validation, held_out, field, shard_tokens, chat)
    folder, encoder, source, _ = request
    if manifest := request.finished():
        return manifest
    done = request.progress("local") or Progress(source)

    def finish_round(pending: dict[str, list[Document]]) -> None:
        request.check_inputs()
        for name, documents in pending.items():
            if documents:
                shard = write_shard(folder, name, done.rounds, documents, encoder)
                done.splits.setdefault(name, []).append(shard)
                documents.clear()
        done.rounds += 1
        write_json(folder, PROGRESS, asdict(done))

    pending, tokens = {name: [] for name in SPLITS}, 0
    total = sum(shard.token_count for shards in done.splits.values() for shard in shards)
    form = partial(conversation_of, tokenizer=encoder) if chat else field
    texts = _labelled(inputs, held_out, validation, form, longest)
    rest = islice(texts, done.documents, None)
    for split, document in encode_conversations(rest, encoder, chat) if chat else encode_documents(rest, encoder):
        done.documents += 1
        if document.byte_count:
            pending[split].append(document)
            tokens += len(document.ids) + 1
            total += len(document.ids) + 1
        if progress:
            progress(done.documents, total)
        if tokens >= shard_tokens:
            finish_round(pending)
            tokens = 0
    if tokens:
        finish_round(pending)
    if not done.splits:
        raise UserError("inputs", inputs, "there is no text in them")
    return finish(request, done.splits)


def describe_request(
    inputs: Sequence[str],
    out: str | os.PathLike,
    tokenizer: str,
    validation: float,
    held_out: Sequence[str],
    field: str,
    shard_tokens: int,
    chat: ChatTemplate | None = None,
) -> Request:
    """Checks the arguments of `prepare` and makes the folder. Raises UserError."""
    if not inputs:
        raise UserError("inputs", list(inputs), "name at least one file, folder or hub: dataset")
    if not 0 <= validation < 1:
        raise UserError("validation", validation, "use a share from 0 up to, not including, 1")
    if shard_tokens < 1:
        raise UserError("shard_tokens", shard_tokens, "needs to be at least 1")
    folder, encoder = storage_path(out, "out"), load_tokenizer(tokenizer)
    if isinstance(folder, RemotePath) and folder.scheme == "hf":
        fix = "prepare it in a folder here, and upload that (hf upload OWNER/NAME FOLDER --repo-type dataset)"
        raise UserError("out", str(out), fix)
    states: dict[Path, tuple[int, ...]] = {}
    with renamed("inputs", "held_out"):
        apart = _described(held_out, states)
    source = {
        "order": "given",  # the order of the inputs: see _difference
        "inputs": _described(inputs, states),
        "held_out": apart,
        "tokenizer": encoder.fingerprint,
        "validation": validation,
        "field": field,
        "shard_tokens": shard_tokens,
    }
    if chat:
        source |= {"field": "messages", "template": chat.text, "template_tokens": chat.tokens}
    with cannot_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return Request(folder, encoder, source, states)


def finish(request: Request, splits: dict[str, list[ShardRecord]]) -> Manifest:
    """Writes the manifest and removes the files that only an unfinished corpus needs. Raises UserError if inputs have
    changed, and for a shard that is missing or cut."""
    request.check_inputs()
    folder = request.folder
    _check_shards(folder, splits)
    dtype = COUNTED_TYPE if "template" in request.source else None
    manifest = write_manifest(folder, request.tokenizer, request.source, splits, dtype)
    _remove_leftovers(folder)
    return manifest


def _check_shards(folder: StoragePath, splits: dict[str, list[ShardRecord]]) -> None:
    with renamed("path", "out"):
        for shards in splits.values():
            check_files(folder, shards)


def _remove_leftovers(folder: StoragePath) -> None:
    """Removes the files that only an unfinished corpus needs."""
    for leftover in (folder / PROGRESS, *(abandoned(folder) if isinstance(folder, Path) else ())):
        leftover.unlink(missing_ok=True)


def _labelled(
    inputs: Sequence[str], held_out: Sequence[str], validation: float, field: Field, longest: int
) -> Iterator[tuple[str, str]]:
    one, apart = isinstance(field, str) and is_one_text(inputs), fingerprints(held_out, field=field, longest=longest)
    yield from split_documents(inputs, validation, field=field, longest=longest, by_place=one, without=apart)
    for text in read_documents(held_out, field=field, longest=longest):
        yield text, "validation"


def _described(inputs: Sequence[str], states: dict[Path, tuple[int, ...]]) -> list[list]:
    """A record of every input, in the order in which they are read: a file with its size and SHA-256 (in an object
    store, when it was changed), and a hub dataset with its commit. Adds the states of files on this machine to
    `states`."""
    found: dict[str | StoragePath, list] = {}
    for path in sources(inputs):
        real = path.resolve() if isinstance(path, Path) else path
        if real in found:
            fix = f"is there twice, by its name, in a folder or by a link to {real}: name it once, or remove the link"
            raise UserError("inputs", str(path), fix)
        if isinstance(path, str):
            dataset = HubDataset.of(path)
            found[real] = [str(dataset.unpinned), None, dataset.commit]
        else:
            found[real] = [_written(path), size_of(path), _content(path, states)]
    return [*found.values()]


def _written(path: StoragePath) -> str:
    """A file name that JSON can store, even if it is not UTF-8."""
    return path.as_posix().encode(errors="backslashreplace").decode()


def _content(path: StoragePath, states: dict[Path, tuple[int, ...]]) -> str:
    if not isinstance(path, Path):
        return f"changed {path.changed()}"
    states[path] = _state(path)
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _state(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _hub_first(described: list[list]) -> list[list]:
    return sorted(described, key=lambda entry: not entry[0].startswith(HUB_PREFIX))


def _same_input(before: list, after: list) -> bool:
    """Whether two records are of the same content, or, where one does not know it, of the same name."""
    known = all(len(entry) > 2 and entry[2] for entry in (before, after))
    if not (before[0].startswith(HUB_PREFIX) and after[0].startswith(HUB_PREFIX)):
        return all(before[i] == after[i] for i in ([1, 2] if known else [0, 1]))
    one, other = (HubDataset.of(entry[0]) for entry in (before, after))
    if dataclasses.replace(one, revision=other.revision) != other:
        return False
    if known:
        return before[2] == after[2]
    return one.revision == other.revision or {one.revision, other.revision} <= {"", "main"}


def _difference(old: dict, new: dict) -> str:
    """How two requests differ, in words; "" if they are equal. Inputs may have moved if their content is the same. Of
    older versions' inputs only path and size are known, and they list all hub datasets before all files."""
    if "order" not in old:
        new = {field: _hub_first(value) if field in _INPUTS else value for field, value in new.items()}
        del new["order"]
    for field, now in ({"template": None} | new).items():  # a request for text has none
        was = old.get(field)
        if field not in _INPUTS:
            if was != now:
                return f"{field} was {was!r} and is now {now!r}"
            continue
        if not isinstance(was, list) or len(was) != len(now):
            return f"{field} are other files"
        for before, after in zip(was, now, strict=True):
            if not isinstance(before, list) or len(before) < 2:
                return f"{field} are other files"
            if not _same_input(before, after):
                if before[0] == after[0] and before[0].startswith(HUB_PREFIX):
                    was_at = dataclasses.replace(HubDataset.of(before[0]), revision=(*before, "")[2])
                    return f"{after[0]} in {field} is now at {after[2]}: that one was {was_at}"
                return f"{after[0]} in {field} has changed, or was another file"
    return ""
