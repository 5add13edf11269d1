"""From weights to rows: a corpus has its share in every stretch of the training; a row's place needs no history."""

import numpy as np
import pytest

from nagjax.data.shares import Apportionment, Part, mean_shares, names_of, parse_mix
from nagjax.errors import UserError

MIXES = [
    ["a=0.7", "b=0.3"],
    ["a=0.9@0,0.5@0.8", "b=0.1"],
    ["a=1@0,0@0.5", "b=0@0.3,1@1", "c=0.01"],
    ["a=1@0,0@1", "b=0@0,1@1"],
    ["a=5", "b=0"],
    ["a=1"],
    [f"{i}={i + 1}" for i in range(9)],
]


def owed(mix, rows, count):
    """Rows of each corpus among the first `count`, by summing the normalised weights on a fine grid."""
    parts = parse_mix(mix)
    places = sorted({0.0, 1.0, *(place for part in parts for place, _ in part.points)})
    weights = np.array([[part.weight(place) for place in places] for part in parts])
    weights /= weights.sum(axis=0)
    at = (np.arange(50 * count) + 0.5) / 50 / rows
    return np.array([np.interp(at, places, share).sum() / 50 for share in weights])


@pytest.mark.parametrize("mix", MIXES)
def test_rows_follow_the_shares_and_number_themselves(mix):
    rows = 600
    apportionment, seen = Apportionment(parse_mix(mix), rows), [0] * len(mix)
    for row in range(rows + 100):  # batches that were left out move the end
        corpus, number = apportionment.place(row)
        assert number == seen[corpus]
        seen[corpus] += 1
        if row % 97 == 0 or row + 1 == rows:
            assert np.abs(owed(mix, rows, row + 1) - seen).max() < max(1.0, len(mix) / 2)
        if row + 1 == rows:
            np.testing.assert_allclose(np.array(seen) / rows, mean_shares(parse_mix(mix)), atol=len(mix) / rows)


def test_a_place_far_into_a_long_training():
    """Row numbers are consecutive from any starting point, even in a training of 10^11 rows."""
    rows = 10**11
    apportionment = Apportionment(parse_mix(["a=0.9@0,0.5@0.8", "b=0.1", "c=3@0.2,0@1"]), rows)
    for begin in (0, 1, rows // 3, rows - 10, rows + 5):
        places = [apportionment.place(row) for row in range(begin, begin + 300)]
        for corpus in range(3):
            numbers = [number for found, number in places if found == corpus]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else corpus == 2


def test_without_a_length_the_mean_shares_hold():
    apportionment = Apportionment(parse_mix(["a=1@0,0@1", "b=0@0,3@1"]), None)
    found = [apportionment.place(row)[0] for row in range(1000)]
    assert abs(sum(found) / 1000 - mean_shares(parse_mix(["a=1@0,0@1", "b=0@0,3@1"]))[1]) < 0.002


def test_words():
    part = Part.of("gs://bucket/a=b=0.9@0,0.5@0.8")
    assert part.path == "gs://bucket/a=b" and part.points == ((0.0, 0.9), (0.8, 0.5))
    assert [part.weight(place) for place in (0.0, 0.4, 0.8, 1.0)] == pytest.approx([0.9, 0.7, 0.5, 0.5])
    assert Part.of(f"x={part.schedule}").points == part.points and Part.of("x=3").schedule == "3.0"
    assert names_of(parse_mix(["x/a=1", "y/b/=1"])) == ("a", "b")
    assert names_of(parse_mix(["x/a=1", "y/a=1", "c=1"])) == ("x/a", "y/a", "c")


@pytest.mark.parametrize(
    "mix, message",
    [
        (["a"], "PATH=WEIGHT"),
        (["=1"], "PATH=WEIGHT"),
        (["a="], "PATH=WEIGHT"),
        (["a=x"], "PATH=WEIGHT"),
        (["a=1@0.5,2@0.5"], "rise"),
        (["a=1@0,2@1.5"], "rise"),
        (["a=1,2"], "PATH=WEIGHT"),
        (["a=1@0,2"], "PATH=WEIGHT"),
        (["a=1@nan"], "rise"),
        (["a=-1"], "from 0"),
        (["a=inf"], "from 0"),
        (["a=1e308", "b=1e308"], "to 1e300"),
        (["a=1", "a=2"], "there twice"),
        (["a=0", "b=0"], "all weights are 0 at the start"),
        (["a=1@0,0@0.5"], "all weights are 0 at share 0.5"),
    ],
)
def test_bad_words(mix, message):
    with pytest.raises(UserError, match=f"data.mix.*{message}"):
        parse_mix(mix)
