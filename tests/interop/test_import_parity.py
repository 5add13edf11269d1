"""Logits of imported models against transformers' own, family by family."""

import numpy as np
import pytest
from parity import TOLERANCE, logits_of
from reference_cases import CASES

import nagjax


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(reference, case):
    run = nagjax.load(reference.folder / case)
    want = reference.logits(case)
    difference = np.abs(logits_of(run, reference.tokens(case)) - want).max()
    assert difference < TOLERANCE
    assert want.std() > 0.1
