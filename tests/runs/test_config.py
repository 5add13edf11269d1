"""A run's config as JSON, whatever the program that made it gave."""

import json
from pathlib import Path

import numpy as np

from nagjax.data import DataConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from nagjax.runs.config import OptimizerConfig, RunConfig, TrainConfig, from_dict, to_dict
from nagjax.sweep import plan


def test_paths_and_numbers_of_numpy_are_json():
    model, optimizer = ModelConfig(depth=np.int64(3)), OptimizerConfig(lr=np.float32(0.5))
    train, data = TrainConfig(tasks=(Path("a.jsonl"), "b")), DataConfig(Path("corpus"))
    values = json.loads(json.dumps(to_dict(RunConfig(find_scheme("plain")(), model, optimizer, train, data))))
    assert values["data"]["path"] == "corpus" and values["train"]["tasks"] == ["a.jsonl", "b"]
    read = from_dict(RunConfig, values)
    assert (read.model.depth, read.optimizer.lr) == (3, 0.5)


def test_a_sweep_varies_an_option_by_any_name_that_a_file_may_give_it():
    for base in ({}, {"scheme": "nag", "data.path": "c"}):
        trials = plan(base, ["scheme.name=plain,nag", "data=a,b"])
        found = [(trial.options.name, trial.options.data.path) for trial in trials]
        assert found == [("plain", "a"), ("plain", "b"), ("nag", "a"), ("nag", "b")]
