"""Every command has an example to be timed with."""

from pathlib import Path

from benchmarks.command_times import work


def test_every_command_is_timed():
    assert {"train", "data chat"} <= work(Path("folder")).keys()  # which refuses to leave one out
