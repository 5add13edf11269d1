"""Metrics writers: JSON lines survive kills, the optional ones get scalars only, and say what to install."""

import json
import sys
import types

import pytest

from nagjax.errors import UserError
from nagjax.runs.metrics import comparable
from nagjax.train.logging.metrics import Writers


def test_lines_after_the_checkpoint_and_a_torn_one_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n{"kind": "tr\xf1')
    writers = Writers(tmp_path, (), {}, resume_step=1)
    writers.write("train", 2, loss=0.5)
    writers.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"kind": "train", "step": 1}, {"kind": "train", "step": 2, "loss": 0.5}]


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rewinding_forgets_later_lines_but_no_event(tmp_path):
    writers = Writers(tmp_path, (), {}, resume_step=0)
    for step in (1, 2, 3):
        writers.write("train", step, loss=1.0)
        writers.write("event", step, message="noted")
        writers.write("eval", step, loss=2.0)
    writers.rewind(2, owed=False)
    kinds = lambda: [(r["kind"], r["step"]) for r in written(tmp_path / "metrics.jsonl")]  # noqa: E731
    first = [("train", 1), ("event", 1), ("eval", 1), ("train", 2), ("event", 2)]
    assert kinds() == [*first, ("eval", 2), ("event", 3)]
    writers.write("train", 3, loss=0.5)
    writers.close()
    Writers(tmp_path, (), {}, resume_step=2, owed=True).close()  # the evaluation at 2 will be made again
    assert kinds() == [*first, ("event", 3)]


def test_what_is_comparable(tmp_path):
    writers = Writers(tmp_path, (), {}, resume_step=0)
    writers.write("train", 1, loss=float("nan"), lr=0.1, mfu=None, step_seconds=0.2, tokens_per_second=9.0)
    writers.write("event", 1, message="noted")
    writers.write("depth", 1, turn=[0.5, float("inf")])
    writers.close()
    assert comparable(tmp_path / "metrics.jsonl") == [
        {"kind": "train", "step": 1, "loss": None, "lr": 0.1},
        {"kind": "depth", "step": 1, "turn": [0.5, None]},
    ]


def test_a_fresh_run_starts_an_empty_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval", "step": 0}\n')
    Writers(tmp_path, (), {}, resume_step=0).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_tensorboard_gets_the_scalars_and_where_a_run_goes_on(tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder, *, purge_step, filename_suffix):
            assert folder == str(tmp_path / "tensorboard")
            written.append((purge_step, filename_suffix))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    writers = Writers(tmp_path, ("tensorboard",), {}, resume_step=0)
    writers.write("depth", 3, turn=[0.1, 0.2], mean=0.15, mfu=None)
    writers.rewind(2, owed=True)
    writers.close()
    Writers(tmp_path, ("tensorboard",), {}, resume_step=5).close()
    assert written == [(0, ".0"), ("depth/mean", 0.15, 3), "closed", (3, ".1"), "closed", (6, ".0"), "closed"]


def test_tensorboard_hides_the_steps_that_are_done_again(tmp_path):
    """With the real writer; read as TensorBoard does: a start of a session drops what has its step or a later one."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    writers = Writers(tmp_path, ("tensorboard",), {}, resume_step=0)
    for step, loss in ((1, 4.0), (2, 3.0), (3, 9.0)):
        writers.write("train", step, loss=loss)
    writers.rewind(2, owed=False)
    writers.write("train", 3, loss=2.0)
    writers.close()
    seen: dict[int, float] = {}
    files = sorted((tmp_path / "tensorboard").iterdir())
    assert len(files) == 2
    for file in files:
        data = file.read_bytes()
        while data:  # length, its checksum, record, its checksum
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                seen = {step: loss for step, loss in seen.items() if step < event.step}
            for value in event.summary.value:
                seen[event.step] = value.simple_value
    assert seen == {1: 4.0, 2: 3.0, 3: 2.0}


def test_wandb_gets_config_and_scalars_by_a_step_that_may_fall(tmp_path, monkeypatch):
    logged = []
    run = types.SimpleNamespace(
        log=logged.append,
        finish=lambda: logged.append("finished"),
        define_metric=lambda name, step_metric=None: logged.append((name, step_metric)),
    )

    def init(**options):
        assert options["config"] == {"a": 1} and options["dir"] == str(tmp_path)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    writers = Writers(tmp_path, ("wandb",), {"a": 1}, resume_step=0)
    writers.write("train", 7, loss=1.25)
    writers.write("event", 7, message="noted")
    writers.rewind(6, owed=False)
    writers.write("train", 7, loss=1.0)
    writers.close()
    lines = [{"train/loss": 1.25, "step": 7}, {"train/loss": 1.0, "step": 7}]
    assert logged == [("step", None), ("*", "step"), *lines, "finished"]


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"pip install -e '\.\[{name}\]'"):
        Writers(tmp_path, (name,), {}, resume_step=0)
