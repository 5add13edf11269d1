"""The files of a tokenizer, which travel with a model."""

import functools
from pathlib import Path

from nagjax.data import ByteTokenizer, Tokenizer
from nagjax.data.tokenizer import END_OF_TEXT, JsonTokenizer, NoTokenizer
from nagjax.errors import UserError
from nagjax.files import copy, has_file, read_json, write_json, write_text
from nagjax.runs.names import ORIGIN, TOKENIZER, TOKENIZER_CONFIG, TOKENIZER_FILES


def copy_files(source: Path, out: Path, without: tuple[str, ...] = ()) -> None:
    """Those of the files that are there, but those named in `without`."""
    for name in TOKENIZER_FILES:
        if name not in without and has_file(source / name):
            copy(source / name, out / name)


def copy_into_run(tokenizer: Tokenizer, source: Path, out: Path) -> None:
    """Those of the model in `source` into a run's folder, which has no tokenizer.json where it reads bytes: with one,
    it would be opened with that."""
    copy_files(source, out, without=(TOKENIZER,) if isinstance(tokenizer, ByteTokenizer) else ())


def write_files(tokenizer: Tokenizer, source: Path, out: Path) -> None:
    """The files of the run in `source`, and a tokenizer.json with its tokenizer_config.json in any case, which names no
    code of others. Raises UserError for a damaged one."""
    copy_files(source, out)
    path = out / TOKENIZER_CONFIG
    kept = _settings(path, source)
    told = {name: value for name, value in kept.items() if name != "auto_map"}  # names a stranger's code
    if not isinstance(tokenizer, NoTokenizer):
        if not (out / TOKENIZER).exists():
            text = byte_level_json() if isinstance(tokenizer, ByteTokenizer) else tokenizer.to_json()
            write_text(out / TOKENIZER, text)
        imported = kept and has_file(source / ORIGIN)  # a model without it has the class of its own kind
        if "tokenizer_class" not in told and not imported:  # a run on conversations keeps what its template reads
            ending = tokenizer.name_of(tokenizer.end_of_text) or END_OF_TEXT
            told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ending} | told
    if told != kept:
        write_json(path, told)


def _settings(path: Path, source: Path) -> dict:
    """What a copy of tokenizer_config.json says; nothing where there is none. Raises UserError for a damaged one."""
    try:
        found = read_json(path, lenient=True) if path.exists() else {}
    except ValueError as error:
        fix = f"cannot be read ({error}): bring it back, or remove it"
        raise UserError("tokenizer", str(source / path.name), fix) from None
    if not isinstance(found, dict):
        raise UserError("tokenizer", str(source / path.name), "is no JSON object: bring it back, or remove it")
    return found


@functools.cache
def json_of_bytes() -> JsonTokenizer:
    """What `byte_level_json` is read as."""
    return JsonTokenizer(byte_level_json(), name="bytes")


def byte_level_json() -> str:
    """The tokenizer of bytes as a tokenizer.json: token i is byte i, and 256 ends a document."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Engine

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for bytes
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    engine = Engine(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return engine.to_str()
