"""What is known of a run without running it: parameters, FLOPs, memory; and what it ran on."""

import dataclasses
import datetime
import importlib.metadata
import math
import subprocess
from pathlib import Path

import jax

from nagjax.data import open_dataset
from nagjax.mod.costs import Costs, costs, mod_rates
from nagjax.mod.routed import MoD
from nagjax.runs.config import MeshConfig, RunConfig
from nagjax.train.distributed.mesh import make_mesh
from nagjax.train.state import Blueprint
from nagjax.train.warm_start import adopted


def resolve(config: RunConfig) -> RunConfig:
    """The config with the vocabulary of its corpus filled in, or the model of the run it starts from."""
    tokenizer = open_dataset(config.data).tokenizer
    if config.start:
        return adopted(config, tokenizer)
    vocab = tokenizer.vocab_size
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab=vocab))


# Dense bfloat16 peak per device, FLOP/s, from the vendors' data sheets; MFU is not given on other devices.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of one device, or None where not known."""
    return next((peak for name, peak in PEAK_FLOPS.items() if device_kind.startswith(name)), None)


def parameters_by_part(blueprint: Blueprint) -> dict[str, int]:
    """Parameter counts: embedding, attention, mlp, residual (entries, gates, ends of the scheme), routing (of
    Mixture-of-Depths), head."""
    parts = dict.fromkeys(("embedding", "attention", "mlp", "residual", "routing", "head"), 0)
    for path, parameter in jax.tree_util.tree_leaves_with_path(blueprint.parameters):
        names = [key.key for key in path]
        if names[0] == "blocks":
            part = {"branch": names[1], "routing": "routing"}.get(names[2], "residual")
        else:
            part = names[0] if names[0] in parts else "residual"
        parts[part] += math.prod(parameter.shape)
    return parts


def model_costs(blueprint: Blueprint) -> Costs:
    """FLOPs, executed parameters and cache per token, with what Mixture-of-Depths skips left out."""
    mod = MoD.of(blueprint.config.scheme, blueprint.config.model.mod, blueprint.config.model.context)
    return costs(blueprint.config.model, blueprint.parameters, mod.router.name, mod.decider.name)


def state_bytes(blueprint: Blueprint) -> dict[str, int]:
    """Bytes of parameters and optimizer state over all devices."""
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    state = blueprint.abstract()
    return {"parameters": size(state.params), "optimizer": size(state.optimizer)}


def commit() -> str | None:
    """Of the checkout this code lies in; None outside of one."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    return found.stdout.strip() or None


def run_facts(blueprint: Blueprint) -> dict:
    """The content of a run's info.json."""
    parts, each = parameters_by_part(blueprint), model_costs(blueprint)
    packages = ("nagjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    return {
        "parameters": sum(parts.values()),
        "parameters_by_part": parts,
        "executed_parameters_per_token": each.executed_parameters,
        "forward_flops_per_token": each.forward,
        "train_flops_per_token": each.train,
        "kv_bytes_per_token": each.kv_bytes,
        "mod_rate": mod_rates(blueprint.config.model),
        "device": blueprint.mesh.devices.flat[0].device_kind,
        "devices": blueprint.mesh.size,
        "mesh": dict(blueprint.mesh.shape),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def describe(config: RunConfig):
    """A console table of a run's parameters by part, FLOPs and memory."""
    from rich.table import Table

    blueprint = Blueprint.of(config, make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    model, parts, memory = blueprint.config.model, parameters_by_part(blueprint), state_bytes(blueprint)
    table = Table(title=f"{config.scheme.title}: {model.depth} blocks x {model.width}", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    total, each, rates = sum(parts.values()), model_costs(blueprint), mod_rates(model)
    for part, count in parts.items():
        table.add_row(f"parameters, {part}", f"{count:,}  ({count / total:5.1%})")
    rows = {
        "parameters": f"{total:,}",
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
        table.add_row(name, value)
    return table


def _shown(rates: dict) -> str:
    """MoD rates in one line, and those of the sublayers where they differ."""
    line = f"{rates['total']:.1%}  (attention {rates['attention']:.1%}, MLP {rates['mlp']:.1%})"
    differ = len(set(rates["sublayers"])) > 1
    return line + ("\n" + " ".join(f"{rate:.0%}" for rate in rates["sublayers"]) if differ else "")


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
