import subprocess
import sys
from itertools import islice

import chex
import numpy as np
import pytest

from nagjax.data import DataConfig, batches, load_tokenizer, open_dataset
from nagjax.errors import UserError

KEYS = {"tokens", "targets", "segment_ids", "positions", "weights"}


def take(iterator, count=None):
    return list(islice(iterator, count))


def joined(parts):
    return {key: np.concatenate([part[key] for part in parts]) for key in KEYS}


def documents_of(dataset):
    """Token lists, each with its closing token, rebuilt from the whole stream."""
    stream = dataset.stream.read(0, len(dataset.stream)).tolist()
    documents, current = [], []
    for token in stream:
        current.append(token)
        if token == dataset.tokenizer.end_of_text:
            documents.append(current)
            current = []
    assert not current
    return documents


def segments_of(row):
    """(inputs, targets, positions) of each segment, checking that segments are runs numbered from 1."""
    ids = row["segment_ids"]
    used = ids[ids > 0]
    assert np.array_equal(np.unique(used), np.arange(1, used.max(initial=0) + 1))
    assert np.all(np.diff(used) >= 0) and np.all(ids[len(used) :] == 0)
    for i in range(1, used.max(initial=0) + 1):
        at = ids == i
        yield row["tokens"][at].tolist(), row["targets"][at].tolist(), row["positions"][at].tolist()


@pytest.mark.parametrize("context, kind", [(3, "bpe_corpus"), (64, "corpus"), (5000, "bpe_corpus")])
def test_every_document_is_predicted_once_and_no_target_crosses(kind, context, request):
    dataset = open_dataset(DataConfig(path=request.getfixturevalue(kind), shuffle=False))
    end = dataset.tokenizer.end_of_text
    rows = take(batches(dataset, batch=1, context=context), dataset.rows(context))
    rebuilt = []
    for one in rows:
        assert set(one) == KEYS
        for key, value in one.items():
            chex.assert_shape(value, (1, context))
            assert value.dtype == (np.float32 if key == "weights" else np.int32)
        np.testing.assert_array_equal(one["weights"], one["segment_ids"] > 0)
        for inputs, targets, positions in segments_of({key: value[0] for key, value in one.items()}):
            assert positions == list(range(len(positions)))
            assert inputs[1:] == targets[:-1]
            if inputs[0] == end:
                rebuilt.append(targets)
            else:  # a document that did not fit goes on after the token it stopped at
                assert inputs[0] == rebuilt[-1][-1]
                rebuilt[-1].extend(targets)
    assert rebuilt == documents_of(dataset)

    whole_pass = joined(take(batches(dataset, batch=4, context=context, repeat=False)))
    assert len(whole_pass["targets"]) == -(-len(rows) // 4) * 4
    used = whole_pass["weights"].any(axis=1)
    for key in KEYS:
        ordered = sorted(row[key].tobytes() for row in rows)
        assert sorted(row.tobytes() for row in whole_pass[key][used]) == ordered


@pytest.mark.parametrize("kind", ["corpus", "bpe_corpus"])
def test_bytes_of_predicted_tokens_are_the_text(kind, request):
    for split in ("train", "validation"):
        dataset = open_dataset(DataConfig(path=request.getfixturevalue(kind)), split=split)
        table = dataset.bytes_per_token()
        seen = sum(
            (table[b["targets"]] * b["weights"]).sum(dtype=np.float64)
            for b in batches(dataset, batch=3, context=50, repeat=False)
        )
        decoded = sum(len(dataset.tokenizer.decode(d).encode()) for d in documents_of(dataset))
        assert seen == decoded == dataset.byte_count


def test_epochs_are_whole_differ_and_follow_the_seed(corpus):
    dataset = open_dataset(DataConfig(path=corpus, seed=3))
    rows = dataset.rows(32)
    batch = next(n for n in range(2, 2000) if rows % n == 0 or n == rows)
    steps = rows // batch
    epochs = [joined(take(it, steps)) for it in [batches(dataset, batch=batch, context=32)] for _ in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(
            np.sort(epoch["targets"][epoch["weights"] > 0]),
            np.sort(dataset.stream.read(0, len(dataset.stream))),
        )
    orders = [epoch["targets"].tobytes() for epoch in epochs]
    for seed in (4, 5):
        other = open_dataset(DataConfig(path=corpus, seed=seed))
        orders.append(joined(take(batches(other, batch=batch, context=32), steps))["targets"].tobytes())
    assert len(set(orders)) == 5
    again = joined(take(batches(dataset, batch=batch, context=32), steps))
    chex.assert_trees_all_equal(again, epochs[0])
    plain = open_dataset(DataConfig(path=corpus, shuffle=False))
    straight = joined(take(batches(plain, batch=batch, context=32), steps))["targets"].ravel()
    np.testing.assert_array_equal(straight[: len(plain.stream)], plain.stream.read(0, len(plain.stream)))


@pytest.mark.parametrize("repeat, at", [(True, 0), (True, 5), (True, 37), (False, 3)])
def test_resumes_exactly(corpus, repeat, at):
    dataset = open_dataset(DataConfig(path=corpus))
    iterator = batches(dataset, batch=8, context=64, repeat=repeat)
    take(iterator, at)
    state = iterator.get_state()
    expected = take(iterator, 40)
    fresh = batches(open_dataset(DataConfig(path=corpus)), batch=8, context=64, repeat=repeat)
    take(fresh, 2)
    fresh.set_state(state)
    chex.assert_trees_all_equal(take(fresh, 40), expected)


def test_workers_make_the_same_batches_and_resume(corpus):
    alone = batches(open_dataset(DataConfig(path=corpus)), batch=4, context=64)
    many = batches(open_dataset(DataConfig(path=corpus, workers=2)), batch=4, context=64)
    try:
        chex.assert_trees_all_equal(take(many, 7), take(alone, 7))
        state = many.get_state()
        expected = take(alone, 5)
        chex.assert_trees_all_equal(take(many, 5), expected)
        many.set_state(state)
        chex.assert_trees_all_equal(take(many, 5), expected)
    finally:
        many.close()


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_same_global_batches(corpus, repeat, processes):
    dataset = open_dataset(DataConfig(path=corpus), split="train")
    one = take(batches(dataset, batch=6, context=100, repeat=repeat), 60)
    shards = [
        take(
            batches(dataset, batch=6, context=100, repeat=repeat, process_index=p, process_count=processes),
            60,
        )
        for p in range(processes)
    ]
    assert len(one) == len(shards[0]) == len(shards[-1]) > 20
    chex.assert_trees_all_equal([joined(parts) for parts in zip(*shards, strict=True)], one)


def test_state_moves_to_another_number_of_processes(corpus):
    dataset = open_dataset(DataConfig(path=corpus))
    one = batches(dataset, batch=4, context=64)
    take(one, 9)
    halves = [batches(dataset, batch=4, context=64, process_index=p, process_count=2) for p in range(2)]
    for half in halves:
        half.set_state(one.get_state())
    chex.assert_trees_all_equal(joined([next(half) for half in halves]), next(one))


def test_last_batch_of_a_pass_is_padded(corpus):
    dataset = open_dataset(DataConfig(path=corpus), split="validation")
    rows = dataset.rows(64)
    batch = rows - 1
    parts = take(batches(dataset, batch=batch, context=64, repeat=False))
    assert len(parts) == 2
    assert not parts[1]["segment_ids"][1:].any() and not parts[1]["weights"][1:].any()
    assert (parts[1]["targets"][1:] == dataset.tokenizer.end_of_text).all()
    assert joined(parts)["weights"].sum() == dataset.token_count


def test_a_pass_is_scattered_and_does_not_depend_on_the_seed(corpus):
    first = [
        next(batches(open_dataset(DataConfig(path=corpus, seed=s, shuffle=h)), batch=8, context=32, repeat=False))
        for s, h in ((0, True), (9, False))
    ]
    chex.assert_trees_all_equal(*first)
    stream = open_dataset(DataConfig(path=corpus)).stream
    assert not np.array_equal(first[0]["targets"].ravel(), stream.read(0, 8 * 32))


def test_orbax_saves_and_restores_the_position(corpus, tmp_path):
    from orbax.checkpoint import v1 as ocp

    dataset = open_dataset(DataConfig(path=corpus))
    iterator = batches(dataset, batch=4, context=32)
    take(iterator, 11)
    ocp.save_checkpointables(tmp_path / "saved", dict(data=iterator))
    expected = take(iterator, 3)
    other = batches(dataset, batch=4, context=32)
    ocp.load_checkpointables(tmp_path / "saved", dict(data=other))
    chex.assert_trees_all_equal(take(other, 3), expected)


def test_bad_sizes(corpus, bpe):
    dataset = open_dataset(DataConfig(path=corpus))
    for wrong, message in (
        (dict(batch=0), "batch = 0"),
        (dict(context=0), "context = 0"),
        (dict(batch=5, process_count=2), "batch = 5.*multiple of the 2 processes"),
        (dict(process_index=1), "process_index = 1"),
        (dict(context=10**6), "context = 1000000.*less than one row"),
    ):
        with pytest.raises(UserError, match=message):
            batches(dataset, **{"batch": 4, "context": 16, **wrong})
    with pytest.raises(UserError, match="was prepared with bytes"):
        open_dataset(DataConfig(path=corpus), tokenizer=load_tokenizer(bpe))


def test_importing_data_does_not_import_jax():
    code = "import sys, nagjax.data; print([m for m in ('jax', 'grain', 'tokenizers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
