"""Several corpora as one: the content of a batch follows from the config and the batch's number alone."""

import contextlib
import dataclasses
from collections import Counter
from itertools import islice

import chex
import numpy as np
import pytest

from nagjax.data import DataConfig, Mixture, batches, open_dataset, prepare, stdlib
from nagjax.data.stream import TokenStream
from nagjax.errors import UserError
from tests.data.test_batches import joined, take

SIZES = {"batch": 6, "context": 32}
STEPS = 40


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """Two corpora whose text tells them apart: of digits, and of letters."""
    rng, made = np.random.default_rng(1), []
    for name, letters in (("digits", "0123456789"), ("letters", "abcdefghij")):
        folder = tmp_path_factory.mktemp(name)
        lines = ["".join(rng.choice(list(letters), size=n)) for n in rng.integers(20, 300, size=30)]
        (folder / "in.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
        prepare([str(folder / "in.jsonl")], folder / name, validation=0.3, shard_tokens=1500)
        made.append(str(folder / name))
    return made


def config(corpora, weights=("0.7", "0.3"), **options):
    return DataConfig(mix=tuple(f"{path}={w}" for path, w in zip(corpora, weights, strict=True)), **options)


def origins(batch):
    """For every row: 0 if it consists of digits, 1 if of letters."""
    found = []
    for targets, weights in zip(batch["targets"], batch["weights"], strict=True):
        text = bytes(t for t, w in zip(targets.tolist(), weights, strict=True) if w and t < 256)
        assert text.isdigit() or text.isalpha()
        found.append(int(text.isalpha()))
    return found


def test_shares_of_rows_and_a_schedule(corpora):
    even = batches(open_dataset(config(corpora)), **SIZES, steps=STEPS)
    counts = Counter(o for batch in take(even, STEPS) for o in origins(batch))
    assert counts[1] / (6 * STEPS) == pytest.approx(0.3, abs=0.005)

    bent = batches(open_dataset(config(corpora, ("0.9@0,0.1@0.5", "0.1@0,0.9@0.5"))), **SIZES, steps=STEPS)
    shares = [np.mean(origins(batch)) for batch in take(bent, STEPS)]
    assert shares[0] == pytest.approx(0.1, abs=0.17) and np.mean(shares[20:]) == pytest.approx(0.9, abs=0.01)
    assert np.mean(shares[:20]) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("weights", [("0.7", "0.3"), ("0.9@0,0.1@0.7", "0.2")])
def test_a_batch_follows_from_its_number(corpora, weights):
    dataset = open_dataset(config(corpora, weights))
    want = take(batches(dataset, **SIZES, steps=STEPS), 60)
    for start in (0, 1, 17, 41, 59):
        chex.assert_trees_all_equal(next(batches(dataset, **SIZES, steps=STEPS, start=start)), want[start])
    for processes in (2, 3):
        shared = [
            take(batches(dataset, **SIZES, steps=STEPS, process_index=p, process_count=processes), 30)
            for p in range(processes)
        ]
        chex.assert_trees_all_equal([joined(parts) for parts in zip(*shared, strict=True)], want[:30])
    iterator = batches(dataset, **SIZES, steps=STEPS)
    take(iterator, 9)
    state = iterator.get_state()
    fresh = batches(open_dataset(config(corpora, weights)), **SIZES, steps=STEPS)
    fresh.set_state(state)
    chex.assert_trees_all_equal(take(fresh, 5), want[9:14])
    other = take(batches(open_dataset(config(corpora, weights, seed=1)), **SIZES, steps=STEPS), 1)
    assert not np.array_equal(other[0]["targets"], want[0]["targets"])


def test_a_worker_makes_the_same_batches(corpora):
    """That several share them: test_batches.py."""
    alone = batches(open_dataset(config(corpora)), **SIZES, steps=STEPS)
    many = batches(open_dataset(config(corpora, workers=1)), **SIZES, steps=STEPS)
    try:
        chex.assert_trees_all_equal(take(many, 5), take(alone, 5))
    finally:
        many.close()


def test_every_corpus_has_its_own_epochs(corpora):
    """Each row of a corpus is read once before any is read again, and the second time in another order."""
    dataset = open_dataset(config(corpora))
    rows = [corpus.rows(32) for corpus in dataset.corpora]
    seen = [[], []]
    for batch in islice(batches(dataset, **SIZES), 4 * max(rows)):
        for origin, targets in zip(origins(batch), batch["targets"], strict=True):
            seen[origin].append(targets.tobytes())
    for corpus, found, count in zip(dataset.corpora, seen, rows, strict=True):
        epochs = [found[:count], found[count : 2 * count]]
        every = [row["targets"][0].tobytes() for row in islice(batches(corpus, batch=1, context=32), count)]
        assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(every) and epochs[0] != epochs[1]


def test_a_host_reads_only_its_rows(corpora, monkeypatch):
    read, counted = TokenStream.read_counted, []
    monkeypatch.setattr(TokenStream, "read_counted", lambda self, *part: counted.append(part) or read(self, *part))
    stream = batches(open_dataset(config(corpora)), **SIZES, process_index=1, process_count=3)
    take(stream, 10)
    assert 10 * 2 <= len(counted) <= (10 + 5) * 2  # two rows a batch, and what is read ahead


def test_validation_goes_through_all_in_turns(corpora):
    dataset = open_dataset(config(corpora), split="validation")
    turns, found = dataset.turns(2, 32), take(batches(dataset, batch=2, context=32, repeat=False))
    assert len(turns) == len(found) and [corpus for corpus, _ in turns[:4]] == [0, 1, 0, 1]
    for (corpus, _), batch in zip(turns, found, strict=True):
        used = batch["weights"].any(axis=1)
        assert set(origins({name: batch[name][used] for name in ("targets", "weights")})) == {corpus}
    assert joined(found)["weights"].sum() == dataset.token_count == sum(c.token_count for c in dataset.corpora)
    halves = [
        take(batches(dataset, batch=2, context=32, repeat=False, process_index=p, process_count=2)) for p in (0, 1)
    ]
    chex.assert_trees_all_equal([joined(parts) for parts in zip(*halves, strict=True)], found)


def test_it_is_a_dataset(corpora):
    dataset = open_dataset(config(corpora))
    assert isinstance(dataset, Mixture) and dataset.names == ("digits", "letters") and dataset.shares == (0.7, 0.3)
    alone = [open_dataset(DataConfig(path)) for path in corpora]
    for what in ("token_count", "document_count", "byte_count"):
        assert getattr(dataset, what) == sum(getattr(one, what) for one in alone)
    assert dataset.content not in {one.content for one in alone}
    assert dataset.content != open_dataset(config(corpora[::-1])).content


def test_what_does_not_fit(corpora, bpe_corpus, tmp_path):
    with pytest.raises(UserError, match=f"data.mix = '{corpora[0]} has bytes .*{bpe_corpus} has .*one tokenizer"):
        open_dataset(config([corpora[0], bpe_corpus]))
    with pytest.raises(UserError, match=r"read stdlib with that of the other \(--data.tokenizer"):
        open_dataset(config([bpe_corpus, "stdlib"]))
    with pytest.raises(UserError, match="data.path.*data.mix"):
        DataConfig(path=corpora[0], mix=("a=1",))
    with pytest.raises(UserError, match="nowhere.*does not exist"):
        open_dataset(config([corpora[0], str(tmp_path / "nowhere")]))
    with pytest.raises(UserError, match="context = 5000.*less than one row"):
        batches(open_dataset(config(corpora)), batch=2, context=5000)
    with pytest.raises(UserError, match="data.mix"):
        DataConfig(mix=["a=1"])


def test_a_corpus_too_short_for_a_row_is_named_unless_its_weight_is_0(corpora, tmp_path):
    (tmp_path / "in.txt").write_text("short")
    short = str(tmp_path / "short")
    prepare(tmp_path / "in.txt", short, validation=0.0)
    for weight, refused in (("0.1", True), ("0@0,0.1@0.5", True), ("0", False)):
        mixture = open_dataset(DataConfig(mix=(f"{corpora[0]}=1", f"{short}={weight}")))
        with pytest.raises(UserError, match=f"train of {short} has only 6") if refused else contextlib.nullcontext():
            next(batches(mixture, batch=4, context=32))


def test_the_library_may_be_one_of_them(corpora, bpe, bpe_corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(stdlib, "stdlib_documents", lambda: [f"print({number})\n" for number in range(200)])
    names = open_dataset(config(["stdlib", corpora[0]])).names
    assert names == ("stdlib", "digits")
    assert open_dataset(config(["stdlib", bpe_corpus], tokenizer=bpe)).tokenizer.vocab_size == 400


def test_corpora_of_equal_length_are_read_in_orders_of_their_own(tmp_path):
    """A row's number stands at its beginning, and after it which corpus it is of. The orders are as they always were:
    a run that was begun by an earlier version goes on with the rows that it has not read."""
    for name in "ab":
        rows = "".join(f"{number:02}" + 14 * name for number in range(40))
        (tmp_path / f"{name}.txt").write_text(rows[:-1])  # and the end of the text
        prepare(tmp_path / f"{name}.txt", tmp_path / name, validation=0.0)
    mixture = config([str(tmp_path / name) for name in "ab"], ("0.5", "0.5"))
    orders = {}
    for seed in (0, 1):
        (batch,) = take(batches(open_dataset(dataclasses.replace(mixture, seed=seed)), batch=16, context=16), 1)
        orders[seed] = " ".join(bytes(row[:3].tolist()).decode() for row in batch["targets"])
    assert orders == {
        0: "00a 13b 18a 08b 19a 00b 10a 34b 02a 38b 15a 39b 23a 22b 16a 11b",
        1: "36a 26b 29a 13b 16a 37b 39a 33b 19a 24b 06a 15b 31a 19b 08a 27b",
    }
