import pytest
from run_folders import write_run


@pytest.fixture
def make_run(tmp_path):
    """Write a run folder of that name and return its path."""
    return lambda name, lines, **config: write_run(tmp_path / name, lines, **config)
