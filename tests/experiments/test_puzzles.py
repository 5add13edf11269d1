import itertools

import numpy as np
import pytest

from experiments.deep_compositional import reach
from experiments.harness.puzzles import GENERATORS, SYMMETRIES, Pointers, Words
from experiments.harness.recipe import load
from nagjax.errors import UserError


def test_pointers_are_followed_one_by_one():
    puzzle = Pointers(nodes=8, hops=4)
    tokens, answers = puzzle.rows(np.random.default_rng(0), 50)
    assert tokens.shape == answers.shape == (50, puzzle.context) and tokens.max() < puzzle.vocab
    for told, asked in zip(tokens, answers, strict=True):
        follows, at = told[:8], told[8]
        assert sorted(follows) == list(range(8)) and not (follows == np.arange(8)).any()
        assert (asked[:8] == -1).all() and (told[9:] == 8).all()  # nothing but hop tokens after the start
        for answer in asked[8:]:
            at = follows[at]
            assert answer == at
        assert len(set(asked[8:])) == 4  # one cycle: no node twice
    assert len(np.unique(tokens[:, :8], axis=0)) > 10
    with pytest.raises(UserError, match="at least 10 nodes"):
        Pointers(nodes=9, hops=5)


def test_words_are_multiplied_one_by_one():
    puzzle = Words(hops=9)
    tokens, answers = puzzle.rows(np.random.default_rng(0), 20)
    for letters, products in zip(tokens, answers, strict=True):
        assert {tuple(SYMMETRIES[letter]) for letter in letters} <= set(GENERATORS)
        product = np.arange(5)
        for letter, answer in zip(letters, products, strict=True):
            product = product[SYMMETRIES[letter]]
            np.testing.assert_array_equal(SYMMETRIES[answer], product)


def test_the_generators_generate_all_of_s5():
    reached, new = {tuple(range(5))}, {tuple(range(5))}
    while new:
        new = {tuple(a[i] for i in g) for a, g in itertools.product(new, GENERATORS)} - reached
        reached |= new
    assert len(reached) == len(SYMMETRIES) == 120


def test_questions_depend_on_seed_and_number_and_tests_are_new():
    recipe = load("deep_compositional")
    jobs = {job.name: job for job in recipe.plan(recipe.settings("cpu"))}
    first, second = (jobs[f"pointers-nag-4-s{seed}"] for seed in (0, 1))
    assert (first.batch(3)["tokens"] == first.batch(3)["tokens"]).all()
    assert not (first.batch(3)["tokens"] == first.batch(4)["tokens"]).all()
    assert not (first.batch(3)["tokens"] == second.batch(3)["tokens"]).all()
    assert (first.batch(3)["tokens"] == jobs["pointers-plain-8-s0"].batch(3)["tokens"]).all()
    asked = first.batch(0)["weights"].sum(axis=1)
    np.testing.assert_array_equal(asked, first.puzzle.hops)


def test_a_trained_model_is_asked_what_it_has_not_seen(tmp_path, monkeypatch):
    job = load("deep_compositional").plan(load("deep_compositional").settings("smoke"))[0]
    asked, batch = [], type(job).batch
    monkeypatch.setattr(type(job), "batch", lambda self, number: asked.append(number) or batch(self, number))
    job.run(tmp_path)
    steps = job.how.train.steps
    assert asked == [*range(steps), *range(steps, steps + job.test_batches)]


@pytest.mark.parametrize("accuracy, hops", [([1.0, 0.95, 0.5, 1.0], 2), ([0.3], 0), ([1.0, 1.0], 2)])
def test_reach(accuracy, hops):
    assert reach(accuracy) == hops
