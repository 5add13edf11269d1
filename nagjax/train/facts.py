"""A run before it is trained: its whole config, its parameters, FLOPs and memory."""

import dataclasses
import math
from pathlib import Path

import jax

from nagjax.data import Tokenizer, open_dataset
from nagjax.layers.config import MoEConfig
from nagjax.mod.costs import mod_rates
from nagjax.runs.config import MeshConfig, RunConfig
from nagjax.runs.facts import model_costs, parameters_by_part
from nagjax.runs.trained import count_trained
from nagjax.train.distributed.mesh import make_mesh
from nagjax.train.state import Blueprint
from nagjax.train.warm_start import adopted

# Rows that do not apply to a model that is not causal: it is not trained here, and it generates no text.
FOR_CAUSAL = ("training FLOPs per token", "training FLOPs per step", "optimizer state", "key/value cache per token")
FOR_CAUSAL += ("skipped (token, sublayer) pairs", "learning rate")


def resolve(config: RunConfig, own: Path | None = None) -> RunConfig:
    """The config with its model completed: the vocabulary of its corpus, or the model of the run that it starts from
    (`adopted`)."""
    return resolved(config, open_dataset(config.data).tokenizer, own)


def resolved(config: RunConfig, tokenizer: Tokenizer, own: Path | None = None) -> RunConfig:
    """`resolve`, given the tokenizer of the corpus."""
    if config.start:
        return adopted(config, tokenizer, own)
    vocab = tokenizer.vocab_size
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab=vocab))


def state_bytes(blueprint: Blueprint) -> dict[str, int]:
    """Bytes over all devices, by "parameters" and "optimizer"; the latter includes the average of the parameters, if
    kept."""
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    state = blueprint.abstract()
    return {"parameters": size(state.params), "optimizer": size((state.optimizer, state.average))}


def describe(config: RunConfig):
    """A `rich` table of a run's parameters by part, its FLOPs, and its memory."""
    from rich.table import Table

    blueprint = Blueprint.of(config, make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    model, parts, memory = blueprint.config.model, parameters_by_part(blueprint), state_bytes(blueprint)
    table = Table(title=f"{config.scheme.title}: {model.depth} blocks x {model.width}", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    trained = count_trained(blueprint.parameters)
    total, each, rates = sum(parts.values()), model_costs(blueprint), mod_rates(model)
    for part, count in parts.items():
        table.add_row(f"parameters, {part}", f"{count:,}  ({count / total:5.1%})")
    rows = {
        "parameters": f"{total:,}",
        **({"of these trained": f"{trained:,}  ({trained / total:5.1%})"} if trained < total else {}),
        **({"experts of each block": _experts(model.moe)} if model.moe.experts else {}),
        "parameters executed per token": f"{each.executed_parameters:,.0f}",
        "forward FLOPs per token": f"{each.forward:,.0f}",
        "training FLOPs per token": f"{each.train:,.0f}",
        "training FLOPs per step": f"{each.train * config.train.batch * model.context:.3e}",
        "parameters, float32": _megabytes(memory["parameters"]),
        "optimizer state": _megabytes(memory["optimizer"]),
        "key/value cache per token": f"{each.kv_bytes:,.0f} bytes",
        "skipped (token, sublayer) pairs": _shown(rates),
        "learning rate": f"{config.learning_rate:.3g}",
    }
    for name, value in rows.items():
        if model.causal or name not in FOR_CAUSAL:
            table.add_row(name, value)
    return table


def _experts(moe: MoEConfig) -> str:
    """How many of the experts a token runs, in words."""
    shared = f" and {moe.shared} shared" if moe.shared else ""
    nothing = f" or nothing ({moe.skips} of {moe.choices} choices)" if moe.skips else ""
    return f"{moe.active} of {moe.experts}{nothing}{shared}, {moe.hidden} features each, {moe.dispatch}"


def _shown(rates: dict) -> str:
    """The MoD rates in one line, and in a second line the rates of the sublayers if they differ."""
    line = f"{rates['total']:.1%}  (attention {rates['attention']:.1%}, MLP {rates['mlp']:.1%})"
    differ = len(set(rates["sublayers"])) > 1
    return line + ("\n" + " ".join(f"{rate:.0%}" for rate in rates["sublayers"]) if differ else "")


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
