"""Activations change as much in a large model as in a small one under muP and CompleteP, and do not under standard.

The ends of the ranges only; `python -m nagjax.measure.coordinates` shows what is between (docs/learning_rates.md).
"""

import functools

import pytest

from nagjax.measure.coordinates import Changes, changes_at, slopes
from nagjax.residual import find_scheme

BASE = {"width": 64, "depth": 2}
found = functools.cache(lambda *chosen, **model: changes_at(find_scheme(chosen[0])(), chosen[1], **BASE | model))


def slope(field: str, size: int, *chosen: str) -> Changes:
    return slopes((BASE[field], size), (found(*chosen), found(*chosen, **{field: size})))


@pytest.mark.parametrize("field, size", [("width", 512), ("depth", 64)])
def test_completep_is_flat_and_standard_is_not(field, size):
    flat, steep = slope(field, size, "completep", "completep"), slope(field, size, "plain", "standard")
    assert max(map(abs, flat[:2])) < 0.12 and abs(flat.logits) < 0.25, flat  # the head's random start fades with width
    assert min(steep) > 0.35, steep


def test_slopes_are_exponents():
    rows = [Changes(size**0.5, 3.0, 2.0 / size) for size in (4, 16, 64)]
    assert slopes((4, 16, 64), rows) == pytest.approx((0.5, 0.0, -1.0), abs=1e-9)
