"""The n-gram floor against a dictionary of counts, and its place beside the runs."""

import collections
import math
from pathlib import Path

import numpy as np
import pytest

from experiments.depth_scaling import COMPARISON, SIZES
from experiments.harness.ngram import Floor, Text, floors, key, losses
from nagjax.data import DataConfig
from nagjax.runs.config import flatten, to_dict


def rows(seed, count, context=12, vocab=5):
    """Batches as the pipeline gives them: two documents to a row, the last target of some rows padding."""
    noise, found = np.random.default_rng(seed), []
    for _ in range(count):
        text = noise.integers(0, vocab, (3, context + 1)).cumsum(axis=1) % vocab
        cut = int(noise.integers(2, context - 2))
        positions = np.tile(np.concatenate([np.arange(cut), np.arange(context - cut)]), (3, 1))
        weights = np.ones((3, context), np.float32)
        weights[0, -1] = 0
        found.append({"tokens": text[:, :-1], "targets": text[:, 1:], "positions": positions, "weights": weights})
    return found


def histories(batches, order):
    for batch in batches:
        parts = (batch[name] for name in ("tokens", "targets", "positions", "weights"))
        for tokens, targets, positions, weights in zip(*parts, strict=True):
            for t in np.flatnonzero(weights):
                known = min(int(positions[t]) + 1, order - 1)
                yield tuple(int(x) for x in tokens[t - known + 1 : t + 1]) if known else (), int(targets[t])


def by_hand(trained, judged, vocab, order):
    counts = collections.defaultdict(collections.Counter)
    for context, target in histories(trained, order):
        for start in range(len(context) + 1):
            counts[context[start:]][target] += 1

    def probability(context, target):
        shorter = probability(context[1:], target) if context else 1 / vocab
        seen = counts.get(context)
        if not seen:
            return shorter
        return (seen[target] + len(seen) * shorter) / (sum(seen.values()) + len(seen))

    assert sum(probability((1, 2), token) for token in range(vocab)) == pytest.approx(1.0)
    return -np.mean([math.log(probability(*pair)) for pair in histories(judged, order)])


def test_tables_are_those_of_counting_by_hand():
    trained, judged = rows(0, 6), rows(1, 3)
    found = losses(Text.of(trained, 4), Text.of(judged, 4), vocab=5)
    assert list(found) == [2, 3, 4, 5]
    for order, loss in found.items():
        assert loss == pytest.approx(by_hand(trained, judged, 5, order), rel=1e-12)


def test_a_text_without_pattern_costs_its_entropy_and_one_with_a_pattern_nothing():
    noise = np.random.default_rng(0).integers(0, 4, (1, 200_001))
    cycle = np.arange(20_001)[None] % 4

    def text(stream):
        length = stream.shape[1] - 1
        positions, weights = np.arange(length)[None], np.ones((1, length), np.float32)
        return Text.of(
            [{"tokens": stream[:, :-1], "targets": stream[:, 1:], "positions": positions, "weights": weights}], 3
        )

    assert losses(text(noise), text(noise), 4, (2,))[2] == pytest.approx(math.log(4), rel=1e-3)
    assert losses(text(cycle), text(cycle), 4, (2, 3))[3] < 1e-3


def test_one_floor_for_every_text_and_a_key_that_finds_it():
    settings = SIZES["smoke"]
    jobs = COMPARISON.plan(settings)
    found = floors(jobs)
    assert len(jobs) == 4 and len(found) == 1  # two arms at two depths read the same
    keys = {key(flatten(to_dict(job.run_config))) for job in jobs}
    assert keys == {key(flatten(found[0].config()))}
    assert None not in keys.pop()


def test_a_floor_is_a_job_on_real_text():
    found = Floor(DataConfig(), context=16, batch=8, steps=20, eval_batches=2).run(Path())
    assert found["targets"] == 256
    values = [found["ngram"][order] for order in "2345"]
    assert 1.5 < min(values) and max(values) < math.log(257) and values[0] == max(values)
