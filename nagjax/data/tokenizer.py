"""Tokenizers: raw bytes, or any `tokenizer.json`. Each knows how many bytes of text its tokens stand for."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Integer

from nagjax.errors import UserError
from nagjax.files import read_bytes
from nagjax.json_reader import parse_json

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
NO_TOKENIZER = "the model came without a tokenizer.json: put one beside its files, and if it was imported do so again"
LARGEST = 1 << 28  # bytes of a tokenizer.json
MOST_TOKENS = 1 << 24
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]", "<｜end▁of▁sentence｜>", "[EOS]")


class Templated(NamedTuple):
    """A chat template's text, tokenised: token ids, where the text of a special token becomes that token; and for each
    token the index of its first character and the index after its last."""

    ids: Int32[np.ndarray, "n"]
    starts: Int32[np.ndarray, "n"]
    stops: Int32[np.ndarray, "n"]


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to token ids and back.

    `token_bytes[i]` is the number of UTF-8 bytes of text that token `i` stands for (special tokens: 0), such that the
    sum over `encode(text)` is exactly the length of `text`; None if there is no such table.
    """

    name: str
    vocab_size: int
    end_of_text: int
    fingerprint: str
    token_bytes: Int32[np.ndarray, "V"] | None

    def encode(self, text: str) -> Int32[np.ndarray, "n"]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "n"]]: ...
    def encode_templated(self, texts: Sequence[str]) -> list[Templated]: ...
    def decode(self, ids: Iterable[int] | Integer[np.ndarray, "n"]) -> str: ...
    def name_of(self, i: int) -> str: ...
    def to_json(self) -> str | None: ...


class ByteTokenizer:
    """The 256 byte values, and one token for the end of a document. Encodes any valid Unicode text without loss."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256
    fingerprint = sha256(b"nagjax bytes 1").hexdigest()

    @property
    def token_bytes(self) -> Int32[np.ndarray, "V"]:
        return np.array([1] * 256 + [0], np.int32)

    def encode(self, text: str) -> Int32[np.ndarray, "n"]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "n"]]:
        return [self.encode(text) for text in texts]

    def encode_templated(self, texts: Sequence[str]) -> list[Templated]:
        lengths = lambda text: [len(letter.encode()) for letter in text]  # noqa: E731
        starts = (np.repeat(np.arange(len(text), dtype=np.int32), lengths(text)) for text in texts)
        return [Templated(self.encode(text), own, own + 1) for text, own in zip(texts, starts, strict=True)]

    def decode(self, ids: Iterable[int] | Integer[np.ndarray, "n"]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode(errors="replace")

    def name_of(self, i: int) -> str:
        return END_OF_TEXT if i == self.end_of_text else f"<0x{i:02X}>"

    def to_json(self) -> str | None:
        return None


class JsonTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    It adds no special tokens, and encodes a special token's text like any other text, so that a document can never end
    itself.
    """

    def __init__(self, text: str, *, name: str):
        self.name = name
        with self._told("not a tokenizer.json the library can read"):
            self._spec = parse_json(text)
            self._engine = _whole_texts(text)
            self._engine.encode_special_tokens = True
            vocabulary = self._engine.get_vocab(with_added_tokens=True)
        self._with_end = self._spec
        self.fingerprint = sha256(json.dumps(self._spec, sort_keys=True).encode()).hexdigest()
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        if self.vocab_size > MOST_TOKENS:
            raise UserError("tokenizer", name, f"has the id {self.vocab_size - 1:,}: give one below {MOST_TOKENS:,}")
        special = [token for token in _KNOWN_ENDS if token in self._special_tokens]
        ending = self.first_of([*special, *_KNOWN_ENDS])  # last: Gemma has </s> for HTML
        if ending is None:
            raise UserError("tokenizer", name, f"needs an end-of-text token, one of {', '.join(_KNOWN_ENDS)}")
        self.end_of_text = ending
        if (word := self._engine.id_to_token(ending)) not in self._special_tokens:
            self._with_end = _with_special(self._spec, word, ending)
            self._engine = _whole_texts(json.dumps(self._with_end))
            self._engine.encode_special_tokens = True

    @property
    def _special_tokens(self) -> set[str]:
        return {token.content for token in self._engine.get_added_tokens_decoder().values() if token.special}

    @property
    def text_vocab(self) -> int:
        """One more than the largest id in a tokenised document, which has no special tokens except end-of-text."""
        ids = self._engine.get_vocab(with_added_tokens=True)
        special = self._special_tokens
        return max((i for token, i in ids.items() if token not in special or i == self.end_of_text), default=0) + 1

    def first_of(self, tokens: Sequence[str]) -> int | None:
        """The id of the first of these tokens that is in the vocabulary; None if none is."""
        return next((i for token in tokens if (i := self._engine.token_to_id(token)) is not None), None)

    def special_ids(self, texts: Iterable[str]) -> list[int]:
        own = self._special_tokens
        return [self._engine.token_to_id(text) for text in texts if text in own]

    @cached_property
    def token_bytes(self) -> Int32[np.ndarray, "V"] | None:
        return _exact_token_bytes(self._spec, self._engine, self.vocab_size)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turns the library's errors into a UserError: plain Exceptions, and Rust panics, which are not Exceptions."""
        try:
            yield
        except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            raise UserError("tokenizer", self.name, f"{what}: {error}") from None

    def encode(self, text: str) -> Int32[np.ndarray, "n"]:
        with self._told("cannot encode this text"):
            return np.array(self._engine.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "n"]]:
        with self._told("cannot encode these texts"):
            encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, np.int32) for encoding in encodings]

    @cached_property
    def _templated(self) -> "tokenizers.Tokenizer":
        processor = self._with_end.get("post_processor")
        return _whole_texts(json.dumps(self._with_end | {"post_processor": processor and _untrimmed(processor)}))

    def encode_templated(self, texts: Sequence[str]) -> list[Templated]:
        with self._told("cannot encode these texts"):
            found = self._templated.encode_batch(list(texts), add_special_tokens=False)
        places = (np.array(one.offsets, np.int32).reshape(-1, 2).T for one in found)
        return [Templated(np.array(one.ids, np.int32), *own) for one, own in zip(found, places, strict=True)]

    def encode_whole(self, text: str) -> Int32[np.ndarray, "n"]:
        """Encodes a text with the tokens that this tokenizer.json puts around it, and with special tokens where it
        contains their text."""
        with self._told("cannot encode this text"):
            return np.array(self._templated.encode(text).ids, np.int32)

    @cached_property
    def _special(self) -> re.Pattern | None:
        own = self._special_tokens
        words = {*own, *map(self._normalised, own)} - {""}
        return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True)))) if words else None

    def _normalised(self, text: str) -> str:
        return self._engine.normalizer.normalize_str(text) if self._engine.normalizer else text

    def special_in(self, text: str) -> str | None:
        """The first special token whose text, as it is or normalised, is contained in `text`; None if there is none."""
        if self._special is None:
            return None
        with self._told("cannot normalise this text"):
            found = self._special.search(text) or self._special.search(self._normalised(text))
        return found[0] if found else None

    def decode(self, ids: Iterable[int] | Integer[np.ndarray, "n"]) -> str:
        with self._told("cannot decode these tokens"):
            return self._engine.decode([int(i) for i in ids], skip_special_tokens=True)

    def name_of(self, i: int) -> str:
        """The token's text in tokenizer.json, even for tokens that decode to nothing; empty if there is no such
        token."""
        return self._engine.id_to_token(int(i)) or ""

    @property
    def in_front(self) -> list[int]:
        """The ids that this tokenizer.json's post-processing puts in front of a text (for example Llama's <s>)."""
        with self._told("cannot encode a letter"):
            plain, whole = (self._engine.encode("a", add_special_tokens=special).ids for special in (False, True))
        ends = [i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain]
        return whole[: max(ends)] if plain and ends else []

    def to_json(self) -> str | None:
        return json.dumps(self._spec, ensure_ascii=False)

    def __getstate__(self) -> dict:
        return {"text": self.to_json(), "name": self.name}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["text"], name=state["name"])


class NoTokenizer:
    """The tokenizer of an imported model that came without a tokenizer.json; such a model reads and writes token ids
    only."""

    name = "none"
    token_bytes = None
    fingerprint = "none"

    def __init__(self, vocab_size: int, end_of_text: int = 0):
        self.vocab_size, self.end_of_text = vocab_size, end_of_text

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError("tokenizer", None, NO_TOKENIZER)

    encode_batch = encode_templated = decode = name_of = encode

    def to_json(self) -> str | None:
        return None


def load_tokenizer(spec: str) -> Tokenizer:
    """`"bytes"`, or the path of a tokenizer.json. Raises UserError for anything else."""
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if not path.is_file():
        raise UserError("tokenizer", spec, 'use "bytes" or the path of an existing tokenizer.json')
    try:
        text = read_bytes(path.resolve(), largest=LARGEST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("tokenizer", spec, f"cannot be read: {error}") from None
    try:
        return JsonTokenizer(text, name=path.stem)
    except UserError as error:
        raise UserError("tokenizer", spec, error.fix) from None


def _whole_texts(text: str) -> "tokenizers.Tokenizer":
    """The library's tokenizer for this JSON text, with truncation and padding turned off."""
    from tokenizers import Tokenizer as Engine

    engine = Engine.from_str(text)
    engine.no_truncation()
    engine.no_padding()
    return engine


def _with_special(spec: dict, word: str, number: int) -> dict:
    """The specification with a word of its vocabulary made a special token."""
    others = [token for token in spec.get("added_tokens") or [] if token["content"] != word]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    own = {"id": number, "content": word, **plain, "special": True}
    return spec | {"added_tokens": sorted([*others, own], key=lambda token: token["id"])}


def _untrimmed(processor: dict) -> dict:
    """The post-processor, changed so that a token's start and stop include its spaces."""
    if processor["type"] == "Sequence":
        return processor | {"processors": [_untrimmed(each) for each in processor["processors"]]}
    return processor | ({"trim_offsets": False} if "trim_offsets" in processor else {})


def _exact_token_bytes(spec: dict, engine: "tokenizers.Tokenizer", vocab_size: int) -> Int32[np.ndarray, "V"] | None:
    """Bytes per token, int32, of a byte-level BPE, whose every symbol is one byte; None if the tokenizer alters the
    text."""
    from tokenizers import pre_tokenizers

    model, alphabet = spec["model"], set(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = engine.get_vocab(with_added_tokens=False)
    altered = (
        spec.get("normalizer") is not None
        or model.get("type") != "BPE"
        or any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"))
        or not _keeps_every_byte(spec.get("pre_tokenizer"))
    )
    if altered or not alphabet <= vocabulary.keys():
        return None
    lengths = np.zeros(vocab_size, np.int32)
    added = engine.get_added_tokens_decoder()  # the library renumbers some tokens, so the file's ids cannot be used
    for token, i in vocabulary.items():
        if i not in added:
            if not alphabet.issuperset(token):
                return None
            lengths[i] = len(token)
    for i, token in added.items():
        if not token.special:
            if token.lstrip or token.rstrip:
                return None
            lengths[i] = len(token.content.encode())
    return lengths


def _keeps_every_byte(pre_tokenizer: dict | None) -> bool:
    steps = [pre_tokenizer or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"]
    *before, last = steps or [{}]
    return (
        last.get("type") == "ByteLevel"
        and not last.get("add_prefix_space", True)
        and all(s["type"] == "Digits" or (s["type"] == "Split" and s["behavior"] != "Removed") for s in before)
    )


def beginning_of(tokenizer: Tokenizer) -> list[int]:
    """The token ids that a tokenizer.json puts before every text; empty for other tokenizers."""
    return tokenizer.in_front if isinstance(tokenizer, JsonTokenizer) else []


def opening_of(tokenizer: Tokenizer) -> int:
    """The token that rows have in front of a document: the one that the tokenizer puts before a text, else
    end-of-text."""
    return [tokenizer.end_of_text, *beginning_of(tokenizer)][-1]


def special_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> list[int]:
    """The ids of those `texts` that are special tokens of a tokenizer.json."""
    return tokenizer.special_ids(texts) if isinstance(tokenizer, JsonTokenizer) else []
