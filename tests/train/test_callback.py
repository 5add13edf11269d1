"""A callback during training: it sees every record and the run of then, changes nothing, and may end the run."""

import json

import jax
import numpy as np
import pytest

import nagjax
from nagjax.runs import names
from nagjax.runs.metrics import comparable
from nagjax.train.checkpoint.store import steps_saved
from nagjax.train.logging.metrics import Writers
from tests import tiny
from tests.tolerance import assert_close

TEXT = "the quick brown"


@pytest.fixture(scope="module")
def fit(corpus):
    """A run of six steps on two devices, with an average of its weights."""
    shape = dict(depth=2, width=16, heads=2, kv_heads=1, context=16, dtype="float32", mesh={"data": 1, "fsdp": 2})
    times = dict(steps=6, batch=4, eval_every=3, eval_batches=1, save_every=2, keep=3, ema=0.5)
    return lambda out, **more: nagjax.fit("plain", out=out, data=corpus, **shape, **times, **more)


def test_it_sees_every_record_and_the_run_of_then_and_may_end_it(fit, tmp_path):
    """After its error, the run goes on without it and ends as one whose callback looked at everything."""
    records, steps, logits, kept = [], [], {}, []

    def look(record, run):
        records.append(record)
        steps.append(run.step)
        kept.append(np.asarray(run.params["head"]["tokens"]))  # which the next step must not write over
        if record["kind"] == "eval":
            logits[run.step] = np.asarray(run.logits(TEXT))

    run = fit(tmp_path / "whole", callback=look)
    lines = (tmp_path / "whole" / names.METRICS).read_text().splitlines()
    assert json.loads(json.dumps(records)) == [json.loads(line) for line in lines]
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    for record, step in zip(records, steps, strict=True):
        assert step - record["step"] in ((0, 1) if record["kind"] == "train" else (0,))
    assert list(logits) == [0, 3, 6] and np.abs(logits[6] - logits[3]).max() > 0.01
    assert_close(logits[6], np.asarray(run.logits(TEXT)), **tiny.FORWARD)
    np.testing.assert_array_equal(kept[-1], run.params["head"]["tokens"])  # both are the average
    assert not np.array_equal(kept[0], kept[-1])

    def stumble(record, run):
        if (record["kind"], record["step"]) == ("train", 5):
            raise ZeroDivisionError("by a callback")

    with pytest.raises(ZeroDivisionError, match="by a callback") as caught:
        fit(tmp_path / "half", callback=stumble)
    assert caught.traceback[-1].name == "stumble"
    assert max(steps_saved(tmp_path / "half" / names.CHECKPOINTS)) == 4
    again = fit(tmp_path / "half")
    assert comparable(tmp_path / "half" / names.METRICS) == comparable(tmp_path / "whole" / names.METRICS)
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)


def test_every_host_calls_it_and_the_first_writes(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writers = Writers(tmp_path, (), {}, 0, callback=told.append)
    writers.write("train", 1, loss=2.0)
    writers.close()
    assert told == [{"kind": "train", "step": 1, "loss": 2.0}] and not any(tmp_path.iterdir())
