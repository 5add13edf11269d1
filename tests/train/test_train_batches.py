"""Batches by number: where a run stands in its data follows from the step, whatever happened."""

import json
import multiprocessing

import numpy as np
import pytest

from nagjax.data import DataConfig, batches, open_dataset
from nagjax.errors import UserError
from nagjax.train.batches import Skipped, TrainBatches


@pytest.fixture(scope="module")
def dataset(corpus):
    return open_dataset(DataConfig(corpus))


def same(got, want):
    return all(np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("processes", [1, 2])
def test_every_batch_by_its_number_for_any_number_of_processes(dataset, processes):
    rows = iter(batches(dataset, batch=4, context=16))
    want = [next(rows) for _ in range(60)]
    parts = [TrainBatches(dataset, 4, 16, process_index=i, process_count=processes) for i in range(processes)]
    for number in (0, 1, 2, 40, 41, 59, 3, 3, 5):
        got = [part.take(number) for part in parts]
        joined = {name: np.concatenate([part[name] for part in got]) for name in got[0]}
        assert same(joined, want[number]), number


def test_a_worker_that_dies_is_replaced(corpus, dataset, capsys):
    rows = iter(batches(dataset, batch=4, context=16))
    taken = TrainBatches(open_dataset(DataConfig(corpus, workers=1)), 4, 16)
    try:
        for number in range(30):
            if number == 2:
                (worker,) = multiprocessing.active_children()
                worker.kill()
            assert same(taken.take(number), next(rows)), number
    finally:
        taken.close()
    assert "exit code -9" in (told := capsys.readouterr().err) and told.count("started again") == 1


def test_workers_that_die_again_and_again_end_the_run_with_their_number(corpus, monkeypatch):
    class Dying:
        def __next__(self):
            raise RuntimeError("Worker process was terminated unexpectedly with exit code -9.")

    monkeypatch.setattr("nagjax.train.batches.batches", lambda *_, **__: Dying())
    with pytest.raises(UserError, match=r"data.workers = 3: .*batch 0.*use fewer"):
        TrainBatches(open_dataset(DataConfig(corpus, workers=3)), 4, 16).take(0)
    with pytest.raises(RuntimeError, match="terminated"):
        TrainBatches(open_dataset(DataConfig(corpus)), 4, 16).take(0)


def test_start_is_checked(dataset):
    with pytest.raises(UserError, match="start"):
        batches(dataset, batch=4, context=16, start=-1)


def test_skipped_batches_are_left_out_and_remembered(tmp_path):
    skipped = Skipped(tmp_path, fresh=True)
    assert [skipped.batch_of(step) for step in (1, 2, 3)] == [0, 1, 2]
    skipped.add(3)
    skipped.add(1)
    skipped.add(4)
    again = Skipped(tmp_path, fresh=False)
    assert [again.batch_of(step) for step in (1, 2, 3, 4)] == [0, 2, 5, 6]
    assert [again.after(step) for step in (0, 1, 2, 3)] == [3, 3, 2, 0]
    assert Skipped(tmp_path, fresh=True).batches == [] and not (tmp_path / "skipped.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"batches": ["x"]}', '{"numbers": []}'])
def test_an_unreadable_record_is_refused(tmp_path, text):
    (tmp_path / "skipped.json").write_text(text)
    with pytest.raises(UserError, match="skipped.json.*--fresh"):
        Skipped(tmp_path, fresh=False)


def test_the_record_is_plain_json(tmp_path):
    Skipped(tmp_path, fresh=True).add(7)
    assert json.loads((tmp_path / "skipped.json").read_text()) == {"batches": [7]}
