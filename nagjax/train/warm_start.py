"""Starting from the parameters of another run, which was trained, pruned or imported."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from nagjax.console import note
from nagjax.data import Tokenizer
from nagjax.data.stdlib import STDLIB
from nagjax.data.tokenizer import NO_TOKENIZER, NoTokenizer
from nagjax.errors import UserError, renamed
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from nagjax.runs.blueprint import Tree
from nagjax.runs.config import DEFAULT_SCHEME, RunConfig
from nagjax.runs.folder import read_config
from nagjax.runs.identity import settle_start_step, start_step_of
from nagjax.runs.names import CHECKPOINTS
from nagjax.runs.opening import option_of, read_origin, tokenizer_of
from nagjax.runs.weights import check_weights, read_weights
from nagjax.train.checkpoint.store import steps_saved
from nagjax.train.distributed.consensus import from_first
from nagjax.train.optimizer import check_schedule
from nagjax.train.state import Blueprint, TrainState

OF_THE_MACHINE = ("dtype", "remat", "attention", "kernels")  # options of how a model is computed
TAKEN = ("lora", "vocab", *OF_THE_MACHINE)  # model options that a new run sets itself
MUCH = 0.01  # the change by a projection, relative to the parameters' norm, that is reported


def adopted(config: RunConfig, tokenizer: Tokenizer | None, own: Path | None = None) -> RunConfig:
    """The config with the model and the scheme of the run in `config.start`. `tokenizer` is the corpus's, None if there
    is none to read. Prints which of the given model options have no effect. Once the run in the folder `own` has begun,
    the model is taken from there, and the other run need not exist any more.

    Raises UserError if there is no run, if it has another tokenizer or none, or if its tokenizer is lost.
    """
    folder = own if own and steps_saved(own / CHECKPOINTS) else Path(config.start)
    with renamed("run", "start" if folder == Path(config.start) else "out"):
        before = read_config(folder)
    if tokenizer is not None:
        _check_tokenizer(config.start, folder, before, tokenizer)
    defaults, named = ModelConfig(), {name.partition(".")[0] for name in config.given}
    told = lambda name, value: value != getattr(defaults, name) and not config.model.follows(name)  # noqa: E731
    asked = {name: value for name, value in vars(config.model).items() if name in named or told(name, value)}
    given = {name: asked[name] for name in OF_THE_MACHINE if name in asked}
    vain = [name for name, value in asked.items() if name not in TAKEN and value != getattr(before.model, name)]
    untold = () if "scheme" in named else (find_scheme(DEFAULT_SCHEME)(),)
    if config.scheme not in (before.scheme, before.scheme.trained(), *untold):
        vain.append("scheme")
    if vain:
        note(f"the model is that of {config.start}: not used of what is given: {', '.join(vain)}")
    reads, read = ([*data.mix] or data.path for data in (config.data, before.data))
    if tokenizer is not None and folder == Path(config.start) and reads == STDLIB != read:
        note(f"the text is {STDLIB}, the default: {config.start} was trained on {read} (--data.path or --data.mix)")
    model = dataclasses.replace(before.model, lora=config.model.lora, **given)
    return dataclasses.replace(config, model=model, scheme=before.scheme.trained())


def _check_tokenizer(start: str, folder: Path, config: RunConfig, tokenizer: Tokenizer) -> None:
    its = tokenizer_of(folder, config.model.vocab, read_origin(folder))
    if its.fingerprint == tokenizer.fingerprint:
        return
    if isinstance(its, NoTokenizer):
        raise UserError("start", start, NO_TOKENIZER)
    own = option_of(its, folder)
    reads, corpus = ("bytes" if one.name == "bytes" else f"the tokenizer {one.name!r}" for one in (its, tokenizer))
    fix = f"reads {reads}, and the corpus is made with {corpus}: prepare the corpus with --tokenizer {own}"
    raise UserError("start", start, f"{fix}, or for stdlib, the default text, give --data.tokenizer {own}")


def check_start(config: RunConfig, folder: Path, fresh: bool) -> None:
    """Checks, before anything in `folder` is deleted or written, that a run can begin. Raises UserError for a new run
    whose schedule is too long for its steps or whose start weights are missing or damaged, and if the run to start from
    is the one in `folder`."""
    own = folder / CHECKPOINTS
    begins = fresh or not steps_saved(own)
    if begins:  # a run of an earlier version continues as it began
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
    if begins and not fresh:
        _begun_with(config.start, folder)


def begin(blueprint: Blueprint, own: Path | None = None) -> TrainState:
    """The state before the first step: initial values, or the parameters of the run in `config.start`. Prints a note if
    the scheme's `constrain` will change them much at the first step, as after merging adapters in nGPT, which moves the
    matrices off the hypersphere.

    The step of that run whose parameters are taken is the newest, and is stored in the folder `own` of the run that
    begins: should this one begin again, it takes the same. Raises UserError if they are gone by then."""
    if not blueprint.config.start:
        return blueprint.create()
    folder = Path(blueprint.config.start)
    config = dataclasses.replace(read_config(folder), mesh=blueprint.config.mesh)
    taken = from_first(lambda: _begun_with(blueprint.config.start, own))
    if taken is None and jax.process_count() > 1:
        # one host takes what is intact while it reads; several agree first, for it may still be training
        taken = from_first(lambda: max(steps_saved(folder / CHECKPOINTS), default=None))
    _, params, taken, mod = read_weights(folder, config, blueprint.mesh, taken)
    if own is not None:
        from_first(lambda: settle_start_step(own, taken))
    state = blueprint.create(params)._replace(mod=mod)  # adapters get their own initial values
    if blueprint.config.scheme.constrains:
        share = float(jax.jit(functools.partial(_projected_away, blueprint))(state.params))
        if share > MUCH and jax.process_index() == 0:
            title = blueprint.config.scheme.title
            note(
                f"{title} projects its parameters after every step: the first changes those of {folder} by {share:.1%}"
            )
    return state


def _begun_with(start: str, own: Path | None) -> int | None:
    """The step of the run in `start` with whose parameters the run in `own` has begun before; None if it has not."""
    step = start_step_of(own, Path(start)) if own is not None else None
    if step is not None and step not in steps_saved(Path(start) / CHECKPOINTS):
        fix = f"this run began with its step {step}, which is gone: bring it back, or begin with the newest by --fresh"
        raise UserError("start", start, fix)
    return step


def _projected_away(blueprint: Blueprint, params: Tree) -> jax.Array:
    """How much `constrain` changes the trained parameters, relative to their norm."""
    part = blueprint.trained(params)
    change = jax.tree.map(jnp.subtract, blueprint.constrained(part), part)
    return optax.tree.norm(change) / optax.tree.norm(part)
