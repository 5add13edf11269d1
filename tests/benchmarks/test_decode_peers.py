"""The table of sampling beside transformers'."""

import json

from benchmarks import decode_peers
from benchmarks import plan_tables as tables


def test_the_table_is_that_of_the_results():
    sittings = json.loads(decode_peers.RESULTS.read_text())
    assert len({one["cpu"] for one in sittings}) == len(sittings) >= 2
    page = decode_peers.PAGE.read_text()
    assert page == tables.inserted(page, decode_peers.texts(sittings))
