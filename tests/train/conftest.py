"""A small corpus, and run configs that share their compiled programs."""

import pytest

from nagjax.data import DataConfig, prepare
from nagjax.residual import find_scheme
from nagjax.runs.config import MeshConfig, RunConfig
from tests import tiny


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"document {i}: " + "the quick brown fox jumps over it. " * (3 + i % 5))
    out = folder / "corpus"
    prepare([str(folder)], out, validation=0.3)
    return str(out)


@pytest.fixture(scope="session")
def run_of(corpus):
    """`run_of(steps=6)`: the config of a tiny run on one device."""

    def make(scheme: str = "nag", lr: float | None = None, mesh: MeshConfig | None = None, **train) -> RunConfig:
        train = dict(steps=6, batch=4, eval_every=3, eval_batches=1, save_every=2) | train
        config = tiny.run_config(find_scheme(scheme)(), optimizer={"lr": lr}, train=train, depth=2, context=16)
        return RunConfig(
            config.scheme, config.model, config.optimizer, config.train, DataConfig(corpus), mesh or MeshConfig(data=1)
        )

    return make
