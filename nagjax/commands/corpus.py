"""nagjax data prepare and nagjax tokenizer train."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nagjax.commands.options import parse
from nagjax.errors import UserError

Inputs = Annotated[tuple[str, ...], tyro.conf.Positional]


def data(args: Sequence[str]) -> None:
    args, options = _divided(args)

    def command(
        inputs: Inputs,
        out: str,
        tokenizer: str = "bytes",
        validation: float = 0.05,
        held_out: tuple[str, ...] = (),
        field: str = "text",
        runner: Literal["local", "beam"] = "local",
    ) -> None:
        """Turn documents into token shards. Stopped and started again, it continues.

        Inputs and out may be gs:// and s3:// paths.

        Args:
            inputs: .txt, .md, .jsonl (also .gz, .xz, .zst) and .parquet files, folders of them, or hub:OWNER/NAME.
            out: the corpus folder to make.
            tokenizer: bytes, or the path of a tokenizer.json.
            validation: share of the documents held out, chosen by their hash.
            held_out: further inputs that are held out whole.
            field: where JSON lines and table rows keep their text.
            runner: local, or beam for Apache Beam, whose own options follow after "--".
        """
        from nagjax.data.beam import prepare_on_beam
        from nagjax.data.prepare import prepare

        given = dict(tokenizer=tokenizer, validation=validation, held_out=held_out, field=field)
        if options and runner == "local":
            raise UserError("--", " ".join(options), "only --runner beam takes options of its own")
        on_beam = runner == "beam"
        manifest = prepare_on_beam(inputs, out, options=options, **given) if on_beam else prepare(inputs, out, **given)
        for split in manifest.splits:
            documents, tokens, size = (manifest.total(split, f"{what}_count") for what in ("document", "token", "byte"))
            print(f"{split:11} {documents:,} documents  {tokens:,} tokens  {size:,} bytes")
        print(f"train on it: nagjax train --data.path {out}")

    parse(command, _after("data", "prepare", args), "data prepare")


def tokenizer(args: Sequence[str]) -> None:
    def command(inputs: Inputs, out: Path, vocab: int = 16384, field: str = "text") -> None:
        """Learn a byte-level BPE tokenizer from documents.

        Args:
            inputs: files or folders, as for `nagjax data prepare`.
            out: the tokenizer.json to write.
            vocab: its size, with 256 bytes and the end-of-text token.
            field: where JSON lines and table rows keep their text.
        """
        from nagjax.data import train_bpe

        trained = train_bpe(inputs, vocab, out, field=field)
        print(f"{out}: {trained.vocab_size} tokens\nuse it: nagjax data prepare ... --tokenizer {out}")

    parse(command, _after("tokenizer", "train", args), "tokenizer train")


def _divided(args: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """What stands before `--`, and after it."""
    at = list(args).index("--") if "--" in args else len(args)
    return args[:at], args[at + 1 :]


def _after(group: str, name: str, args: Sequence[str]) -> Sequence[str]:
    """What follows the second word; `nagjax GROUP --help` explains the one command there is."""
    if args and args[0] in ("-h", "--help"):
        return args
    if not args or args[0] != name:
        raise UserError(group, args[0] if args else "", f"use: nagjax {group} {name} ...")
    return args[1:]
