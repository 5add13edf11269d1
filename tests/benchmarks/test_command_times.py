"""Every command has an example to be timed with."""

from pathlib import Path

from benchmarks.command_times import work
from nagjax.config_file import is_config_file


def test_every_command_is_timed():
    assert {"train", "data chat"} <= work(Path("folder")).keys()  # which refuses to leave one out


def test_a_sweep_is_timed_with_a_file_that_it_takes():
    assert is_config_file(work(Path("folder"))["sweep"].split()[0])
