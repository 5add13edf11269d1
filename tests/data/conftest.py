import json
from pathlib import Path

import numpy as np
import pytest

from nagjax.data import prepare, train_bpe

SHARED = Path(__file__).parents[3] / "shared" / "data"
ALPHABET = "the stream carries what every layer wrote; naïve Übung, 日本語, 🙂 and def f(x): return x\n"


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def texts():
    """60 distinct documents of 1 to 900 characters, a third of them not ASCII."""
    rng = np.random.default_rng(0)
    letters = list(ALPHABET)
    made = ["".join(rng.choice(letters, size=n)) for n in rng.integers(1, 900, size=58)]
    return [*made, "x", "a <|endoftext|> inside a document is text"]


@pytest.fixture(scope="session")
def jsonl(texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture(scope="session")
def bpe(jsonl, tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe([jsonl], 400, path)
    return str(path)


@pytest.fixture(scope="session")
def corpus(jsonl, tmp_path_factory):
    """The documents as bytes, in several shards."""
    out = tmp_path_factory.mktemp("corpus")
    prepare([jsonl], out, validation=0.2, shard_tokens=7000)
    return str(out)


@pytest.fixture(scope="session")
def bpe_corpus(jsonl, bpe, tmp_path_factory):
    out = tmp_path_factory.mktemp("bpe_corpus")
    prepare([jsonl], out, tokenizer=bpe, validation=0.2, shard_tokens=3000)
    return str(out)


@pytest.fixture(scope="session")
def shared_data():
    if not SHARED.is_dir():
        pytest.skip(f"no text collection at {SHARED}")
    return SHARED
