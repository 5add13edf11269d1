"""data prepare: turn documents into token shards; data chat: the same for conversations."""

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from nagjax.arguments import POSITIONAL, Rest
from nagjax.console import Progress, note, say
from nagjax.errors import UserError
from nagjax.ranges import Count, Range

if TYPE_CHECKING:
    from nagjax.data.manifest import Manifest


def prepare(
    inputs: Annotated[tuple[str, ...], POSITIONAL],
    out: str,
    beam_options: Rest,
    tokenizer: str = "bytes",
    validation: Annotated[float, Range(ge=0, lt=1)] = 0.05,
    held_out: tuple[str, ...] = (),
    field: str = "text",
    longest: Count = 2**26,
    runner: Literal["local", "beam"] = "local",
) -> None:
    """Turn documents into token shards. If interrupted, the same command continues.

    Inputs and out may be gs:// and s3:// paths. With --runner beam, Apache Beam's own options may follow after "--".

    Args:
        inputs: .txt, .md, .jsonl (also .gz, .xz, .zst) and .parquet files, folders of them, or hub:OWNER/NAME.
        out: the corpus folder to make.
        tokenizer: bytes, or the path of a tokenizer.json.
        validation: share of the documents to hold out, chosen by their hash; a text file is held out as a whole or not
            at all, but if it is the only input, its end is held out.
        held_out: further inputs, all of which are held out; documents that are among both are not trained on.
        field: the field with the text in JSON lines and table rows; with a "?" after its name, lines and rows whose
            text is null or missing are left out (a table must have the column).
        longest: most characters that one JSON line or table row may have.
        runner: local, or beam for Apache Beam, whose own options follow after "--".
    """
    if beam_options and runner == "local":
        raise UserError("--", " ".join(beam_options), "only --runner beam takes options of its own")
    say(f"preparing {len(inputs) + len(held_out)} inputs with tokenizer {tokenizer}, into {out}")
    _note_left_out((*inputs, *held_out))
    given = dict(tokenizer=tokenizer, validation=validation, held_out=held_out, field=field, longest=longest)
    with _lock(out, "data prepare"):
        if runner == "beam":
            from nagjax.data.beam import prepare_on_beam

            manifest = prepare_on_beam(inputs, out, options=list(beam_options), **given)
        else:
            from nagjax.data.preparation import prepare

            progress = Progress("documents")
            manifest = prepare(inputs, out, progress=lambda n, tokens: progress(n, f"{tokens:,} tokens"), **given)
    _tell(manifest, "documents", f"nagjax train --data.path {shlex.quote(out)}")


def chat(
    inputs: Annotated[tuple[str, ...], POSITIONAL],
    out: str,
    tokenizer: str = "bytes",
    template: str | None = None,
    validation: Annotated[float, Range(ge=0, lt=1)] = 0.05,
    held_out: tuple[str, ...] = (),
    longest: Count = 2**26,
) -> None:
    """Turn conversations into token shards for supervised fine-tuning. A chat template turns each
    conversation into text, of which only the answers are training targets. If interrupted, the same command continues.

    Each line or row of the inputs is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}, or
    {"prompt": "...", "response": "..."}.

    Args:
        inputs: .jsonl files (also .gz, .xz, .zst) and .parquet files, folders of them, or hub:OWNER/NAME.
        out: the corpus folder to make.
        tokenizer: bytes, or the path of a tokenizer.json, such as the one in the folder of the run to start from.
        template: a file with a Jinja template; by default the tokenizer's own, in chat_template.jinja or
            tokenizer_config.json beside it, or a simple one if it has none.
        validation: share of the conversations to hold out, chosen by their hash.
        held_out: further inputs, all of which are held out; conversations that are among both are not trained on.
        longest: most characters that one line or row may have.
    """
    from nagjax.data.chat_template import find_template
    from nagjax.data.preparation import prepare

    form = find_template(tokenizer, template)
    say(f"preparing conversations of {len(inputs) + len(held_out)} inputs by the template {form.name}, into {out}")
    _note_left_out((*inputs, *held_out))
    given = dict(tokenizer=tokenizer, validation=validation, held_out=held_out, longest=longest, chat=form)
    progress = Progress("conversations")
    with _lock(out, "data chat"):
        manifest = prepare(inputs, out, progress=lambda n, tokens: progress(n, f"{tokens:,} tokens"), **given)
    then = f"nagjax train --start RUN --out NEW --data.path {shlex.quote(out)} --data.rows whole"
    _tell(manifest, "conversations", then)


def _note_left_out(inputs: tuple[str, ...]) -> None:
    from nagjax.data.documents import left_out

    if found := left_out(inputs):
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        note(f"nagjax: left out, of other formats: {', '.join(found[:3])}{more}")


EMPTY = {
    "train": "a smaller --validation, or with more inputs",
    "validation": "--held-out FILES, with a larger --validation, or with more inputs",
}


def _tell(manifest: "Manifest", what: str, then: str) -> None:
    """What is in a corpus, and the command that trains on it, or what it lacks for that."""
    for split in manifest.splits:
        documents, tokens, size = (manifest.total(split, f"{count}_count") for count in ("document", "token", "byte"))
        print(f"{split:11} {documents:,} {what}  {tokens:,} tokens  {size:,} bytes")
    empty = [split for split in EMPTY if not manifest.total(split, "document_count")]
    for split in empty:
        print(f"{split} is empty, and training needs it: prepare into another --out with {EMPTY[split]}")
    if not empty:
        print(f"train on it: {then}")


def _lock(out: str, verb: str) -> contextlib.AbstractContextManager:
    """A finished corpus is read only, but for what a killed process has left; an object store has no locks."""
    from nagjax.data.storage import storage_path
    from nagjax.data.store import MANIFEST, PROGRESS
    from nagjax.runs.lock import WriterLock
    from nagjax.runs.names import LOCK

    folder = storage_path(out, "out")
    if not isinstance(folder, Path):
        return contextlib.nullcontext()
    unfinished = not (folder / MANIFEST).exists() or any((folder / name).exists() for name in (PROGRESS, LOCK))
    return WriterLock(folder, verb) if unfinished else contextlib.nullcontext()


SUBCOMMANDS = (prepare, chat)
