import json

import jax.numpy as jnp
import pytest

from nagjax.data import DataConfig, prepare
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig, TrainConfig, to_dict
from nagjax.train.checkpoint.store import Checkpoints
from tests.run_fixtures import make_run  # noqa: F401
from tests.tiny import blueprint, model_config, moved


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A NAG run of four blocks on a few lines of text, stopped in the middle of its training."""
    corpus, folder = tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("runs") / "nag"
    (corpus / "train.txt").write_text("it was a dark and stormy night; " * 30)
    (corpus / "held.txt").write_text("the rain fell in torrents, " * 12)
    prepare([str(corpus / "train.txt")], corpus / "bytes", validation=0.0, held_out=[str(corpus / "held.txt")])
    config = RunConfig(
        find_scheme("nag")(),
        model_config(depth=4, vocab=257, context=16),
        train=TrainConfig(steps=1000, batch=2),
        data=DataConfig(path=str(corpus / "bytes")),
    )
    state = blueprint(config).init(0)
    state = state._replace(step=jnp.int32(30), params=moved(state.params, 0.2))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(30, state)
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    return folder
