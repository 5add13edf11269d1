"""The files of a tokenizer, which travel with a model."""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Integer

from nagjax.data import ByteTokenizer, Tokenizer
from nagjax.data.tokenizer import END_OF_TEXT
from nagjax.errors import UserError

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


def copy_files(source: Path, out: Path) -> None:
    """Those of the files that are there."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def write_files(tokenizer: Tokenizer, source: Path, out: Path) -> None:
    """The files of the run in `source`, and a tokenizer.json with its tokenizer_config.json in any case."""
    copy_files(source, out)
    if isinstance(tokenizer, NoTokenizer):
        return
    if not (out / "tokenizer.json").exists():
        text = byte_level_json() if isinstance(tokenizer, ByteTokenizer) else tokenizer.to_json()
        (out / "tokenizer.json").write_text(text, encoding="utf-8")
    if not (out / "tokenizer_config.json").exists():
        ending = _token(json.loads((out / "tokenizer.json").read_text(encoding="utf-8")), tokenizer.end_of_text)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ending}
        (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _token(spec: dict, wanted: int) -> str:
    added = {entry["id"]: entry["content"] for entry in spec.get("added_tokens", ())}
    return added.get(wanted, END_OF_TEXT)


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


def added_in_front(path: Path) -> list[int]:
    """The ids that a tokenizer.json, by its own post-processing, puts before a text (Llama's <s>, say)."""
    from tokenizers import Tokenizer as Engine

    if not path.is_file():
        return []
    engine = Engine.from_file(str(path))
    plain, whole = (engine.encode("a", add_special_tokens=special).ids for special in (False, True))
    return whole[: max(i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain)] if plain else []


class NoTokenizer:
    """Of a model that came without a tokenizer.json: it reads and writes token ids only."""

    name = "none"
    token_bytes = None
    fingerprint = "none"

    def __init__(self, vocab_size: int, end_of_text: int = 0):
        self.vocab_size, self.end_of_text = vocab_size, end_of_text

    def _refuse(self):
        return UserError("tokenizer", None, "the model came without a tokenizer.json: put it beside the model's files")

    def encode(self, text: str) -> Int32[np.ndarray, "n"]:
        raise self._refuse()

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "n"]]:
        raise self._refuse()

    def decode(self, ids: Iterable[int] | Integer[np.ndarray, "n"]) -> str:
        raise self._refuse()

    def to_json(self) -> str | None:
        return None
