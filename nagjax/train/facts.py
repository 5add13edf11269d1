"""What is known of a run without running it: parameters, FLOPs, memory; and what it ran on."""

import dataclasses
import datetime
import importlib.metadata
import math
import subprocess
from pathlib import Path

import jax

from nagjax.data import open_dataset
from nagjax.model.config import ModelConfig
from nagjax.train.config import MeshConfig, RunConfig
from nagjax.train.mesh import make_mesh
from nagjax.train.state import Blueprint


def resolve(config: RunConfig) -> RunConfig:
    """The config with the vocabulary of its corpus filled in."""
    vocab = open_dataset(config.data).tokenizer.vocab_size
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
    """Parameter counts: embedding, attention, mlp, residual (entries, gates, ends of the scheme), head."""
    parts = dict.fromkeys(("embedding", "attention", "mlp", "residual", "head"), 0)
    for path, parameter in jax.tree_util.tree_leaves_with_path(blueprint.parameters):
        names = [key.key for key in path]
        if names[0] == "blocks":
            part = names[1] if names[2] == "branch" else "residual"
        else:
            part = names[0] if names[0] in parts else "residual"
        parts[part] += math.prod(parameter.shape)
    return parts


def forward_flops_per_token(blueprint: Blueprint) -> float:
    """Floating-point operations of one token's forward pass: 2 per multiply-add of every matrix product.

    Parameters of two or more dimensions per block, attention scores and mixing over the causal average of
    (context + 1) / 2 keys (dense backends compute the masked half too; it is not counted), and the head.
    """
    config: ModelConfig = blueprint.config.model
    stacked = jax.tree.leaves(blueprint.parameters["blocks"])
    products = sum(math.prod(p.shape) for p in stacked if len(p.shape) >= 3)
    attention = config.depth * 2 * config.heads * config.head_width * (config.context + 1) / 2
    return 2.0 * (products + attention + config.vocab * config.width)


def train_flops_per_token(blueprint: Blueprint) -> float:
    """Forward and backward pass: three times the forward pass."""
    return 3.0 * forward_flops_per_token(blueprint)


def state_bytes(blueprint: Blueprint) -> dict[str, int]:
    """Bytes of parameters and optimizer state over all devices."""
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    state = blueprint.abstract()
    return {"parameters": size(state.params), "optimizer": size(state.optimizer)}


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Bytes a token adds to the key/value cache."""
    return 2 * config.depth * config.kv_heads * config.head_width * config.compute_dtype.itemsize


def _commit() -> str | None:
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    return found.stdout.strip() or None


def run_facts(blueprint: Blueprint) -> dict:
    """The content of a run's info.json."""
    parts = parameters_by_part(blueprint)
    packages = ("nagjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    return {
        "parameters": sum(parts.values()),
        "parameters_by_part": parts,
        "train_flops_per_token": train_flops_per_token(blueprint),
        "kv_bytes_per_token": kv_bytes_per_token(blueprint.config.model),
        "device": blueprint.mesh.devices.flat[0].device_kind,
        "devices": blueprint.mesh.size,
        "mesh": dict(blueprint.mesh.shape),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "commit": _commit(),
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
    total = sum(parts.values())
    for part, count in parts.items():
        table.add_row(f"parameters, {part}", f"{count:,}  ({count / total:5.1%})")
    rows = {
        "parameters": f"{total:,}",
        "forward FLOPs per token": f"{forward_flops_per_token(blueprint):,.0f}",
        "training FLOPs per token": f"{train_flops_per_token(blueprint):,.0f}",
        "training FLOPs per step": f"{train_flops_per_token(blueprint) * config.train.batch * model.context:.3e}",
        "parameters, float32": _megabytes(memory["parameters"]),
        "optimizer state": _megabytes(memory["optimizer"]),
        "key/value cache per token": f"{kv_bytes_per_token(model):,} bytes",
        "learning rate": f"{config.learning_rate:.3g}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
