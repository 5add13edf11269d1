import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compile):
    pass
