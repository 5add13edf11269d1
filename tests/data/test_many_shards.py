"""The files of a corpus: more than a process may open by default, and an index that is damaged."""

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
    """At most a dozen further files, whatever other tests have left open; what was allowed before comes back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last, taken = max(map(int, os.listdir("/dev/fd"))), [os.dup(0)]
    while taken[-1] < last:  # no number before the last one stays free
        taken.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 13, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for number in taken:
        os.close(number)


def test_the_limit_is_raised_where_it_may_be(shards, limit):
    found = TokenStream(shards, exact=True)
    assert found.read(0, len(found)).tolist() == [token for i in range(SHARDS) for token in (i, i, 0)]
    assert found.document_ends.tolist() == list(range(3, 3 * SHARDS + 1, 3))


def test_where_it_may_not_the_error_says_what_to_do(shards, limit, monkeypatch):
    monkeypatch.setattr(stream.resource, "setrlimit", lambda *_: (_ for _ in ()).throw(ValueError()))
    with pytest.raises(UserError, match="data.path = .*too many files are open in this process.*ulimit -n"):
        TokenStream(shards, exact=True).read(0, 3 * SHARDS)


def test_an_index_that_does_not_fit_its_tokens_is_named_when_it_is_read():
    stream = TokenStream([(np.zeros(5, np.int32), np.array([[3, 1], [4, 1]]))], exact=True)
    with pytest.raises(UserError, match="^data.path = .*copy it again, or delete the folder and prepare"):
        stream.document(0)
