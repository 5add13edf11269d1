"""Training that begins with another run's parameters."""

import json

import jax
import numpy as np
import pytest
import tiny

from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.generate.load import open_run
from nagjax.residual import find_scheme
from nagjax.train.config import RunConfig, TrainConfig
from nagjax.train.loop import train


def test_a_run_goes_on_from_another(tmp_path):
    """The first evaluation is the other run's last one; model and scheme are the other run's; it resumes."""
    options = TrainConfig(steps=2, batch=8, eval_batches=2, eval_every=2, save_every=2)
    first = tiny.run_config(find_scheme("nag")(directions=3), train=vars(options), context=16)
    train(first, tmp_path / "first")
    again = RunConfig(find_scheme("plain")(), train=options, start=str(tmp_path / "first"))
    train(again, tmp_path / "second")
    lines = {
        name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    }
    losses = {name: [line["loss"] for line in own if line["kind"] == "eval"] for name, own in lines.items()}
    assert losses["second"][0] == pytest.approx(losses["first"][-1], rel=1e-6)
    assert losses["second"][-1] != losses["second"][0]
    opened = open_run(tmp_path / "second")
    assert opened.config.scheme.directions == 3 and opened.config.scheme.ramp == 0.0
    assert opened.config.model.context == 16 and opened.config.start == str(tmp_path / "first")
    before = jax.device_get(opened.params)
    path = tmp_path / "second" / "config.json"
    values = json.loads(path.read_text())
    del values["model"]["block"]  # as if written before there was such an option
    path.write_text(json.dumps(values))
    train(again, tmp_path / "second")
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(open_run(tmp_path / "second").params))


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path):
    from nagjax.interop.tokenizer_files import byte_level_json

    (tmp_path / "other.json").write_text(byte_level_json())
    config = tiny.run_config(find_scheme("plain")(), train={"steps": 1, "batch": 8, "eval_batches": 1})
    train(config, tmp_path / "first")
    data = DataConfig(tokenizer=str(tmp_path / "other.json"))
    with pytest.raises(UserError, match="start = .*reads bytes, the corpus other"):
        train(RunConfig(find_scheme("plain")(), data=data, start=str(tmp_path / "first")), tmp_path / "second")
    assert not (tmp_path / "second").exists()
