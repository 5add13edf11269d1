"""How far apart two programs for the same mathematics may end, on any CPU.

Instruction sets, threads and fusions add the same terms in another order, with or without fused multiply-adds. An
operation is off by half a unit in the last place of its result; a sum of `terms` numbers is off by about the root of
`terms` of these, and a `chain` of sums by the root of their number, as a random walk is. The worst of thousands of
elements lies some such errors out, and the two programs err both: SPREAD is for these.

What cancels leaves a small number with the error of what it was made of. So errors are absolute as well, in units of
the array's largest magnitude, or of `scale` where more than is left was added up.

This holds where nothing magnifies: not across a step of Adam from a gradient that is nothing but rounding, nor behind
a choice between equals. Tests begin where there is neither (`tiny.start`) and train with an epsilon above rounding
(`tiny.EPSILON`). Bit equality is asked for only of one compiled program on equal inputs (a run that is resumed), of
copies, and of sums in which all terms but one are zero.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

SPREAD = 8.0


def relative(terms: int, chain: int = 1, dtype=np.float32) -> float:
    """The relative tolerance of a value as large as the terms that were added up."""
    return SPREAD * float(jnp.finfo(dtype).eps) * math.sqrt(terms * chain)


def limits(want, terms: int, chain: int = 1, scale: float = 0.0, dtype=np.float32) -> dict[str, float]:
    """`rtol` and `atol` for an array like `want`."""
    sizes = np.abs(np.asarray(want, np.float64))
    largest = max(scale, float(np.max(sizes, where=np.isfinite(sizes), initial=0.0)))
    found = relative(terms, chain, dtype)
    return {"rtol": found, "atol": found * largest}


def assert_close(got, want, terms: int, chain: int = 1, scale: float = 0.0, dtype=np.float32, err_msg: str = ""):
    """Of arrays, or leaf by leaf of two trees."""
    tree = all(isinstance(side, tuple | list | dict) for side in (got, want))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True) if tree else ((got, want),)
    for one, other in pairs:
        allowed = limits(other, terms, chain, scale, dtype)
        sides = np.asarray(one, float), np.asarray(other, float)
        np.testing.assert_allclose(*sides, err_msg=err_msg, equal_nan=False, **allowed)


def close_to(want: float, terms: int, chain: int = 1, scale: float = 0.0, dtype=np.float32):
    """A number that `==` compares within the tolerance."""
    allowed = limits(want, terms, chain, scale, dtype)
    return pytest.approx(float(want), rel=allowed["rtol"], abs=allowed["atol"])
