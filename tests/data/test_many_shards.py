"""A corpus of more files than a process may open by default."""

import os
import resource

import numpy as np
import pytest

from nagjax.data import stream
from nagjax.data.stream import ArrayFile, TokenStream
from nagjax.errors import UserError

SHARDS = 60


@pytest.fixture
def shards(tmp_path):
    """Of three tokens each, that are one document."""
    found = []
    for i in range(SHARDS):
        np.array([i, i, 0], np.uint16).tofile(tmp_path / f"{i}.tokens")
        np.array([[3, 2]], np.int64).tofile(tmp_path / f"{i}.index")
        files = ArrayFile(tmp_path / f"{i}.tokens", "uint16", (3,)), ArrayFile(tmp_path / f"{i}.index", "int64", (1, 2))
        found.append(files)
    return found


@pytest.fixture
def limit():
    """At most a dozen further files, and what was allowed before comes back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_free = os.dup(0)
    os.close(next_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free + 12, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_is_raised_where_it_may_be(shards, limit):
    found = TokenStream(shards, exact=True)
    assert found.read(0, len(found)).tolist() == [token for i in range(SHARDS) for token in (i, i, 0)]
    assert found.document_ends.tolist() == list(range(3, 3 * SHARDS + 1, 3))


def test_where_it_may_not_the_error_says_what_to_do(shards, limit, monkeypatch):
    monkeypatch.setattr(stream.resource, "setrlimit", lambda *_: (_ for _ in ()).throw(ValueError()))
    with pytest.raises(UserError, match="data.path = .*too many files are open in this process.*ulimit -n"):
        TokenStream(shards, exact=True).read(0, 3 * SHARDS)
