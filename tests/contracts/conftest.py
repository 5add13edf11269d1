"""Every scheme there is, found by itself, and the options that change its parameters."""

import pytest

from nagjax.residual import find_scheme, schemes

SCHEMES = schemes() | {"review-rank_2": lambda: find_scheme("review")(rank=2)}


@pytest.fixture(params=SCHEMES)
def scheme(request):
    return SCHEMES[request.param]()


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compile):
    pass
