"""The kernels of add_rms_norm and review_update: under the interpreters, and lowered."""

import functools

import pytest

from pallas_kernels import add_rms_norm, review_update
from pallas_kernels.launch import interpreting
from pallas_kernels.shapes import COVER_SMALL, COVER_WIDE
from tests.pallas_kernels import row_oracles
from tests.pallas_kernels.kernel_lowering import CUSTOM_CALL, INTERPRETERS, PLATFORM

OPS = {  # the op, and its number of row and of vector arguments
    "add_rms_norm": (add_rms_norm, 2, 1),
    "review_update": (review_update, 4, 2),
}
SHAPES = {  # every width for one of the two
    "add_rms_norm": COVER_SMALL[2:] + COVER_WIDE[::2],
    "review_update": COVER_SMALL[1:3] + COVER_WIDE[1::2],
}


@pytest.mark.parametrize("name", INTERPRETERS)
@pytest.mark.parametrize("op, shape", [(op, shape) for op in OPS for shape in SHAPES[op]], ids=str)
def test_interpreted_against_float64(op, shape, name):
    call, rows, vectors = OPS[op]
    primals, cotangents = row_oracles.inputs(rows, vectors, *shape)
    with interpreting(INTERPRETERS[name]):
        step = {name: functools.partial(call, implementation=name)}
        row_oracles.compare(getattr(row_oracles, op), step, primals, cotangents)


@pytest.mark.parametrize("name", PLATFORM)
@pytest.mark.parametrize("op", OPS)
def test_lowers_to_its_kernel(lower, op, name):
    call, rows, vectors = OPS[op]
    primals, cotangents = row_oracles.inputs(rows, vectors, 300, 1000, "bfloat16")
    for chosen in (name, None):
        step = functools.partial(row_oracles.with_gradients, functools.partial(call, implementation=chosen))
        assert lower(PLATFORM[name], step, primals, cotangents).count(CUSTOM_CALL[name]) >= 2
