"""Shares of a mixture: for every row of the training, the corpus that it comes from, and which row of that corpus it
is, if weights change over training."""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nagjax.errors import UserError

FIELD = "data.mix"
_HOW = "write PATH=WEIGHT, or PATH=WEIGHT@SHARE,WEIGHT@SHARE with shares of the training that rise from 0 to 1"


@dataclass(frozen=True)
class Part:
    """One corpus of a mixture: its path, and its weight at points of the training, linear between them."""

    path: str
    points: tuple[tuple[float, float], ...]  # (share of the training, weight), shares ascending

    @classmethod
    def of(cls, text: str) -> "Part":
        """Parses `PATH=0.7` or `PATH=0.9@0,0.5@0.8`. Raises UserError for anything else."""
        path, mark, weights = text.rpartition("=")
        points = []
        for word in weights.split(","):
            weight, at, share = word.partition("@")
            try:
                points.append((float(share) if at else 0.0, float(weight)))
            except ValueError:
                raise UserError(FIELD, text, _HOW) from None
        places = [place for place, _ in points]
        rising = all(a < b for a, b in itertools.pairwise(places)) and 0.0 <= places[0] and places[-1] <= 1.0
        if not (path and mark and rising and (len(points) == 1 or weights.count("@") == len(points))):
            raise UserError(FIELD, text, _HOW)
        if not all(0.0 <= weight <= 1e300 for _, weight in points):
            raise UserError(FIELD, text, "weights are numbers from 0 to 1e300")
        return cls(path, tuple(points))

    def weight(self, place: float) -> float:
        """The weight at a share of the training; constant before the first point and after the last one."""
        after = bisect.bisect_right(self.points, (place, math.inf))
        if after in (0, len(self.points)):
            return self.points[max(after - 1, 0)][1]
        (left, low), (right, high) = self.points[after - 1], self.points[after]
        return low + (high - low) * ((place - left) / (right - left))

    @property
    def schedule(self) -> str:
        """The weights in the form that `of` parses."""
        if len(self.points) == 1:
            return repr(self.points[0][1])
        return ",".join(f"{weight!r}@{place!r}" for place, weight in self.points)


def parse_mix(texts: Sequence[str]) -> tuple[Part, ...]:
    """The corpora of a mixture. Raises UserError if a corpus is given twice, or if all weights are 0 at some point."""
    parts = tuple(Part.of(text) for text in texts)
    paths = [part.path for part in parts]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(FIELD, path, "is there twice: give it one weight")
    if parts:
        _normalised(parts)
    return parts


def names_of(parts: Sequence[Part]) -> tuple[str, ...]:
    """The names of the corpora in logs: the last part of the path, or the whole path where that would not be unique."""
    short = [part.path.rstrip("/").rpartition("/")[2] for part in parts]
    return tuple(name if short.count(name) == 1 else part.path for name, part in zip(short, parts, strict=True))


def _normalised(parts: Sequence[Part]) -> tuple[list[float], list[list[float]]]:
    """All points of the training at which a weight's slope changes, with 0 and 1; and for each part its weight there
    divided by the sum of the weights."""
    places = sorted({0.0, 1.0, *(place for part in parts for place, _ in part.points)})
    shares: list[list[float]] = [[] for _ in parts]
    for place in places:
        weights = [part.weight(place) for part in parts]
        if not (total := math.fsum(weights)) > 0.0:
            at = f"at share {place:g} of the training" if place else "at the start"
            raise UserError(FIELD, [f"{p.path}={p.schedule}" for p in parts], f"all weights are 0 {at}: raise one")
        for share, weight in zip(shares, weights, strict=True):
            share.append(weight / total)
    return places, shares


def mean_shares(parts: Sequence[Part]) -> tuple[float, ...]:
    """Each corpus's share of all rows of the training."""
    places, shares = _normalised(parts)
    curves = [_Curve(places, share) for share in shares]
    total = math.fsum(curve.sums[-1] for curve in curves)
    return tuple(curve.sums[-1] / total for curve in curves)


def among(shares: Sequence[float], there: Sequence[int]) -> tuple[float, ...]:
    """The shares of these corpora among themselves; equal shares if all are 0."""
    total = sum(shares[corpus] for corpus in there)
    return tuple(shares[corpus] / total if total else 1.0 / len(there) for corpus in there)


class _Curve:
    """The rows that a corpus is owed as a function of the number of rows in all: the integral of its share, which is
    linear between `places` and constant after the last one."""

    def __init__(self, places: Sequence[float], shares: Sequence[float]):
        self.places, self.shares = list(places), list(shares)
        self.slopes = [(b - a) / (y - x) for (x, y), (a, b) in self._pieces()] + [0.0]
        steps = [0.5 * (a + b) * (y - x) for (x, y), (a, b) in self._pieces()]
        self.sums = [0.0, *itertools.accumulate(steps)]

    def _pieces(self):
        return zip(itertools.pairwise(self.places), itertools.pairwise(self.shares), strict=True)

    def owed(self, time: float) -> float:
        piece = max(bisect.bisect_right(self.places, time) - 1, 0)
        past = time - self.places[piece]
        return self.sums[piece] + (self.shares[piece] + 0.5 * self.slopes[piece] * past) * past

    def due(self, number: int) -> float:
        """The time, in rows of the training, at which row `number` is due, because half of it is owed; infinite if it
        never is."""
        target = number + 0.5
        piece = bisect.bisect_left(self.sums, target) - 1
        left, share, slope = target - self.sums[piece], self.shares[piece], self.slopes[piece]
        root = share + math.sqrt(max(share * share + 2.0 * slope * left, 0.0))
        return self.places[piece] + 2.0 * left / root if root > 0.0 else math.inf


class Apportionment:
    """Assigns every row of a training to a corpus and to a row of that corpus.

    A corpus's rows are due at the times at which the integral of its share reaches 1/2, 3/2, 5/2 ...; the training
    takes the rows of all corpora in the order of these times (ties: in the order of the corpora). So every stretch of
    rows has each corpus's share to within about a row, nothing is drawn at random, and a row's corpus can be computed
    without counting the rows before it. `rows` is the length of the whole training, to which the points of a schedule
    refer; None: every corpus has its mean share throughout.
    """

    def __init__(self, parts: Sequence[Part], rows: int | None):
        places, shares = _normalised(parts)
        if rows is None:
            places, shares = [0.0], [[share] for share in mean_shares(parts)]
        self._curves = [_Curve([place * (rows or 1) for place in places], share) for share in shares]

    def place(self, row: int) -> tuple[int, int]:
        """The corpus of row `row` (from 0), and how many rows of that corpus come before it."""
        early = row - len(self._curves)  # by this time at most `row` rows are due, and at least row - 3/2 corpora
        counts = [self._due_by(curve, early) for curve in self._curves]
        due = [curve.due(count) for curve, count in zip(self._curves, counts, strict=True)]
        for _ in range(row - sum(counts)):
            first = due.index(min(due))
            counts[first] += 1
            due[first] = self._curves[first].due(counts[first])
        first = due.index(min(due))
        return first, counts[first]

    @staticmethod
    def _due_by(curve: _Curve, time: float) -> int:
        """The number of a corpus's rows that are due by a time. `due` alone decides, so that rounding in `owed` has no
        effect."""
        count = max(math.floor(curve.owed(time) + 0.5), 0) if time > 0 else 0
        while count and curve.due(count - 1) > time:
            count -= 1
        while curve.due(count) <= time:
            count += 1
        return count
