import pytest
from variants import SCHEMES


@pytest.fixture(params=SCHEMES)
def scheme(request):
    return SCHEMES[request.param]()


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compile):
    pass
