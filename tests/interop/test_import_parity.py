"""Logits of imported models against transformers' own, family by family."""

import numpy as np
import pytest

from nagjax.interop.source import read_source
from tests.interop.parity import TOLERANCE, logits_of
from tests.interop.reference_cases import CASES, SHORTER


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(reference, case):
    run = read_source(reference.folder / case, context=SHORTER.get(case))
    want = reference.logits(case)
    difference = np.abs(logits_of(run, reference.tokens(case)) - want).max()
    assert difference < TOLERANCE
    assert want.std() > 0.1
