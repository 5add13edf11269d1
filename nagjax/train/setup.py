"""Opens everything that a training run needs, so that errors show before anything is written."""

import dataclasses
from pathlib import Path

from nagjax.data import Dataset, open_dataset
from nagjax.errors import UserError
from nagjax.runs.config import RunConfig
from nagjax.train.batches import TrainBatches
from nagjax.train.distributed.mesh import batch_share, check_platform, check_rows, make_mesh
from nagjax.train.evaluator import Evaluator
from nagjax.train.facts import resolved
from nagjax.train.state import Blueprint
from nagjax.train.tasks import Tasks, open_tasks


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run's blueprint (with its complete config), corpus, training batches, evaluator and tasks."""

    blueprint: Blueprint
    corpus: Dataset
    batches: TrainBatches
    evaluator: Evaluator
    tasks: Tasks


def set_up(config: RunConfig, folder: Path | None = None) -> Setup:
    """Opens what the run needs; if it has already begun in `folder`, its model is the one there. Raises UserError for
    options that do not fit together and for data that cannot be read."""
    if config.model.lora.rank and not config.start:
        fix = "adapters need a model to adapt: name its run with --start, or use --lora.rank 0"
        raise UserError("lora.rank", config.model.lora.rank, fix)
    corpus = open_dataset(config.data)
    config = resolved(config, corpus.tokenizer, folder)
    config.model.check_causal("training")
    mesh = make_mesh(config.mesh)
    check_platform(config.model, mesh.devices.flat[0].platform)
    check_rows(config.train.batch, config.train.accumulate, mesh.shape)
    sizes = config.train.batch, config.model.context, config.train.steps
    batches = TrainBatches(corpus, *sizes, **batch_share(mesh))
    blueprint = Blueprint.of(config, mesh)
    tasks = open_tasks(config.train.tasks, corpus.tokenizer, config.model.context, config.train.tasks_limit)
    return Setup(blueprint, corpus, batches, Evaluator(blueprint), tasks)
