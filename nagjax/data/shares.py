"""Shares of a mixture: how weights that change over training become the corpus, and the row in it, of every row."""

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
    """One corpus of a mixture: where it is, and its weight at points of the training, linear in between."""

    path: str
    points: tuple[tuple[float, float], ...]  # (share of the training, weight), the former rising

    @classmethod
    def of(cls, text: str) -> "Part":
        """`PATH=0.7` or `PATH=0.9@0,0.5@0.8`. Raises UserError."""
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
        """At a share of the training; before the first point and after the last one it is constant."""
        after = bisect.bisect_right(self.points, (place, math.inf))
        if after in (0, len(self.points)):
            return self.points[max(after - 1, 0)][1]
        (left, low), (right, high) = self.points[after - 1], self.points[after]
        return low + (high - low) * ((place - left) / (right - left))

    @property
    def schedule(self) -> str:
        """The weights, as `of` reads them."""
        if len(self.points) == 1:
            return repr(self.points[0][1])
        return ",".join(f"{weight!r}@{place!r}" for place, weight in self.points)


def parse_mix(texts: Sequence[str]) -> tuple[Part, ...]:
    """The corpora of a mixture. Raises UserError for one that is there twice, or weights that are all 0 somewhere."""
    parts = tuple(Part.of(text) for text in texts)
    paths = [part.path for part in parts]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(FIELD, path, "is there twice: give it one weight")
    if parts:
        _normalised(parts)
    return parts


def names_of(parts: Sequence[Part]) -> tuple[str, ...]:
    """What each is called in logs: the last part of its path, or all of it where two would be called the same."""
    short = [part.path.rstrip("/").rpartition("/")[2] for part in parts]
    return tuple(name if short.count(name) == 1 else part.path for name, part in zip(short, parts, strict=True))


def _normalised(parts: Sequence[Part]) -> tuple[list[float], list[list[float]]]:
    """Every place where a weight bends, 0 and 1 among them, and there the weights divided by their sum, by part."""
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
    """The shares of these corpora among themselves; equal ones where all are 0."""
    total = sum(shares[corpus] for corpus in there)
    return tuple(shares[corpus] / total if total else 1.0 / len(there) for corpus in there)


class _Curve:
    """The rows that a corpus is owed after so many rows in all: the integral of its share, which is linear between
    `places` and constant behind the last one."""

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
        """When half of row `number` is owed: the time at which it is to come; infinite where it never is."""
        target = number + 0.5
        piece = bisect.bisect_left(self.sums, target) - 1
        left, share, slope = target - self.sums[piece], self.shares[piece], self.slopes[piece]
        root = share + math.sqrt(max(share * share + 2.0 * slope * left, 0.0))
        return self.places[piece] + 2.0 * left / root if root > 0.0 else math.inf


class Apportionment:
    """Which corpus every row of a training is of, and the number of the row in it.

    Each corpus's rows are due at the times at which its share, summed up, reaches 1/2, 3/2, 5/2 ...; all of them in the
    order of those times are the rows of the training (ties: in the order of the corpora). So every stretch of rows has
    of each corpus what its share says to about a row, nothing is drawn at random, and a row's place needs no count of
    those before it. `rows`: of the whole training, which the places of a schedule are shares of; None: every corpus
    has its mean share throughout.
    """

    def __init__(self, parts: Sequence[Part], rows: int | None):
        places, shares = _normalised(parts)
        if rows is None:
            places, shares = [0.0], [[share] for share in mean_shares(parts)]
        self._curves = [_Curve([place * (rows or 1) for place in places], share) for share in shares]

    def place(self, row: int) -> tuple[int, int]:
        """The corpus of row `row` (from 0), and how many rows of it come before."""
        early = row - len(self._curves)  # by then at most `row` rows are due, and at least row - 3/2 corpora
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
        """How many rows of a corpus are due by a time; decided by `due` alone, however `owed` was rounded."""
        count = max(math.floor(curve.owed(time) + 0.5), 0) if time > 0 else 0
        while count and curve.due(count - 1) > time:
            count -= 1
        while curve.due(count) <= time:
            count += 1
        return count
