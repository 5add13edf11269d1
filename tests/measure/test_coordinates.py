"""Activations change as much in a large model as in a small one under muP and CompleteP, and do not under standard.

The ends of the ranges only; `python -m nagjax.measure.coordinates` shows what is between (docs/learning_rates.md).
"""

import functools

import jax
import pytest

from nagjax.measure import coordinates
from nagjax.measure.coordinates import Changes, changes_at, slopes
from nagjax.residual import find_scheme

BASE = {"width": 64, "depth": 2}
SIZES = {"width": (64, 512), "depth": (2, 64)}  # both begin at the base


@functools.cache
def found(*chosen: str, **model: int) -> Changes:
    """With the generator of random numbers that compiles fastest: half of a program is otherwise the initial values."""
    with jax.default_prng_impl("rbg"):
        return jax.block_until_ready(changes_at(find_scheme(chosen[0])(), *chosen[1:], **model))


def slope(field: str, *chosen: str) -> Changes:
    return slopes(SIZES[field], [found(*chosen, **BASE | {field: size}) for size in SIZES[field]])


@pytest.mark.parametrize(
    "field, chosen",
    [
        ("width", ("completep", "completep", "adamw")),
        ("depth", ("completep", "completep", "adamw")),
        ("width", ("plain", "mup", "adamw")),
        ("width", ("nag", "mup", "adamw")),
        ("width", ("plain", "mup", "muon")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_under_mup_and_completep_they_do(field, chosen, monkeypatch):
    if "muon" in chosen:  # its updates are of one size from the first on: further ones show the same, at a high price
        monkeypatch.setattr(coordinates, "STEPS", 2)
    flat = slope(field, *chosen)
    assert max(map(abs, flat[:2])) < 0.12 and abs(flat.logits) < 0.25, flat  # the head's random start fades with width


@pytest.mark.parametrize("field", SIZES)
def test_under_standard_they_do_not(field):
    """Nor with NAG, nor with Muon, whose three slopes over width are 0.6 to 1.0 and 0.4 to 1.0."""
    steep = slope(field, "plain", "standard", "adamw")
    assert min(steep) > 0.35, steep


def test_slopes_are_exponents():
    rows = [Changes(size**0.5, 3.0, 2.0 / size) for size in (4, 16, 64)]
    assert slopes((4, 16, 64), rows) == pytest.approx((0.5, 0.0, -1.0), abs=1e-9)
