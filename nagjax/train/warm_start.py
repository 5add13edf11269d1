"""Beginning with the parameters of another run: one that was trained, pruned or imported."""

import dataclasses
from pathlib import Path

from nagjax.console import note
from nagjax.data import Tokenizer
from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.runs.config import RunConfig
from nagjax.runs.folder import read_config
from nagjax.runs.names import CHECKPOINTS, TOKENIZER
from nagjax.runs.opening import own_tokenizer
from nagjax.runs.trained import with_part
from nagjax.runs.weights import check_weights, read_weights
from nagjax.train.checkpoint.store import steps_saved
from nagjax.train.optimizer import check_schedule
from nagjax.train.state import Blueprint, TrainState

OF_THE_MACHINE = ("dtype", "remat", "attention", "kernels")  # how a model is computed, not which one it is


def adopted(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """The config with the model and the scheme of the run in `config.start`; `tokenizer` is of the corpus. Tells
    which of the model's options were given in vain.

    Raises UserError: no run there, or one of another tokenizer.
    """
    folder = Path(config.start)
    before, own, path = read_config(folder), own_tokenizer(folder), folder / TOKENIZER
    if own.fingerprint != tokenizer.fingerprint:
        fix = f"reads {own.name}, the corpus {tokenizer.name}: prepare the corpus with {path}"
        raise UserError("start", config.start, f"{fix}, or for stdlib give --data.tokenizer {path}")
    given = {name: getattr(config.model, name) for name in OF_THE_MACHINE}
    given = {name: value for name, value in given.items() if value != "auto"}
    defaults, taken = ModelConfig(), ("lora", "vocab", *OF_THE_MACHINE)
    asked = {name: value for name, value in vars(config.model).items() if value != getattr(defaults, name)}
    if vain := [n for n, value in asked.items() if n not in taken and value != getattr(before.model, n)]:
        note(f"the model is that of {config.start}: not used of what is given: {', '.join(vain)}")
    model = dataclasses.replace(before.model, lora=config.model.lora, **given)
    return dataclasses.replace(config, model=model, scheme=before.scheme.trained())


def check_start(config: RunConfig, folder: Path, fresh: bool) -> None:
    """Raises UserError, before anything in `folder` is deleted or written, for a new run with a schedule that its steps
    are too few for or with weights that are not there or damaged, and where the run to start from is the one there."""
    own = folder / CHECKPOINTS
    begins = fresh or not steps_saved(own)
    if begins:  # one of an earlier version goes on as it began
        check_schedule(config.optimizer)
    if not config.start:
        return
    before = Path(config.start) / CHECKPOINTS
    if before.resolve() == own.resolve():
        raise UserError("out", str(folder), "is the run to start from: choose another --out")
    if begins and not steps_saved(before):
        raise UserError("start", config.start, "has no checkpoint yet: train it first, or bring its checkpoints back")
    if begins:
        check_weights(Path(config.start))


def begin(blueprint: Blueprint) -> TrainState:
    """The state before the first step: start values, or the parameters of the run in `config.start`."""
    state, start = blueprint.create(), blueprint.config.start
    if not start:
        return state
    folder = Path(start)
    config = read_config(folder)
    found = read_weights(folder, dataclasses.replace(config, mesh=blueprint.config.mesh), blueprint.mesh)
    params = with_part(state.params, found.params)  # adapters have start values of their own
    return state._replace(params=params, mod=found.mod, average=blueprint.first_average(params))
