import pytest

from tests.contracts.variants import SCHEMES


@pytest.fixture(params=SCHEMES)
def scheme(request):
    return SCHEMES[request.param]()
