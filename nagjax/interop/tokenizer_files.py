"""Copies and writes the files of a tokenizer that belong to a model."""

import functools
from pathlib import Path

from nagjax.data import ByteTokenizer, Tokenizer
from nagjax.data.tokenizer import END_OF_TEXT, JsonTokenizer, NoTokenizer
from nagjax.errors import UserError
from nagjax.files import copy, has_file, read_json, write_json, write_text
from nagjax.runs.names import ORIGIN, TOKENIZER, TOKENIZER_CONFIG, TOKENIZER_FILES


def copy_files(source: Path, out: Path, without: tuple[str, ...] = ()) -> None:
    """Copies those of the files that exist, except those named in `without`."""
    for name in TOKENIZER_FILES:
        if name not in without and has_file(source / name):
            copy(source / name, out / name)


def copy_into_run(tokenizer: Tokenizer, source: Path, out: Path) -> None:
    """Copies the tokenizer's files of the model in `source` into a run's folder. A run that reads bytes gets no
    tokenizer.json, because it would be opened with that."""
    copy_files(source, out, without=(TOKENIZER,) if isinstance(tokenizer, ByteTokenizer) else ())


def write_files(tokenizer: Tokenizer, source: Path, out: Path) -> None:
    """Writes the tokenizer's files of the run in `source`. If the run has a tokenizer, these always include a
    tokenizer.json and a tokenizer_config.json. The latter never names third-party code. Raises UserError for a damaged
    file."""
    copy_files(source, out)
    path = out / TOKENIZER_CONFIG
    kept = _settings(path, source)
    told = {name: value for name, value in kept.items() if name != "auto_map"}  # names third-party code
    if not isinstance(tokenizer, NoTokenizer):
        if not (out / TOKENIZER).exists():
            text = byte_level_json() if isinstance(tokenizer, ByteTokenizer) else tokenizer.to_json()
            write_text(out / TOKENIZER, text)
        imported = kept and has_file(source / ORIGIN)  # a model's settings without a class mean that of its own kind
        if "tokenizer_class" not in told and not imported:  # a run on conversations keeps only what its template reads
            ending = tokenizer.name_of(tokenizer.end_of_text) or END_OF_TEXT
            told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ending} | told
    if told != kept:
        write_json(path, told)


def _settings(path: Path, source: Path) -> dict:
    """The values of tokenizer_config.json; empty if there is none. Raises UserError for a damaged file."""
    try:
        found = read_json(path, lenient=True) if path.exists() else {}
    except ValueError as error:
        fix = f"cannot be read ({error}): bring it back, or remove it"
        raise UserError("tokenizer", str(source / path.name), fix) from None
    if not isinstance(found, dict):
        raise UserError("tokenizer", str(source / path.name), "is not a JSON object: bring it back, or remove it")
    return found


@functools.cache
def json_of_bytes() -> JsonTokenizer:
    """The tokenizer that `byte_level_json` describes."""
    return JsonTokenizer(byte_level_json(), name="bytes")


def byte_level_json() -> str:
    """The byte tokenizer as a tokenizer.json: token i is byte i, and token 256 ends a document."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Engine

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's printable characters for bytes
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    engine = Engine(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return engine.to_str()
