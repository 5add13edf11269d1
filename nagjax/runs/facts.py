"""The content of a run's info.json: facts about its model, the settings by which its steps are judged, its machine and
versions."""

from pathlib import Path

import jax

from nagjax.files import read_json
from nagjax.mod.costs import Costs, costs, mod_rates
from nagjax.mod.routed import MoD
from nagjax.runs.blueprint import ModelBlueprint
from nagjax.runs.identity import JUDGEMENT
from nagjax.runs.names import INFO
from nagjax.runs.trained import count_trained
from pallas_kernels.origin import commit, now, processor, versions

# Dense bfloat16 peak per device, FLOP/s, from the vendors' data sheets, by the beginning of the device's name; the
# longest match counts. Other devices have no MFU, and neither has a part of a GPU (MIG).
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v4 lite": 138e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v5e": 197e12,
    "TPU v5 lite": 197e12,
    "TPU v6e": 918e12,
    "TPU v6 lite": 918e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of one device, or None if unknown."""
    if " MIG " in device_kind:
        return None
    names = [name for name in PEAK_FLOPS if device_kind.startswith(name)]
    return PEAK_FLOPS[max(names, key=len)] if names else None


def parameters_by_part(blueprint: ModelBlueprint) -> dict[str, int]:
    """The numbers of parameters in the embedding, attention, mlp, residual (the scheme's own), routing
    (Mixture-of-Depths) and head; and in the adapters, if there are any."""
    parts = dict.fromkeys(("embedding", "attention", "mlp", "residual", "routing", "head"), 0)
    parts |= {"adapters": 0} if blueprint.config.model.lora.rank else {}
    for path, parameter in jax.tree_util.tree_leaves_with_path(blueprint.parameters):
        names = [key.key for key in path]
        if names[0] == "blocks":
            part = {"branch": names[1], "routing": "routing", "lora": "adapters"}.get(names[2], "residual")
        else:
            part = {"transform": "head"}.get(names[0], names[0] if names[0] in parts else "residual")
        parts[part] += parameter.size
    return parts


def model_costs(blueprint: ModelBlueprint, **options) -> Costs:
    """FLOPs, executed parameters and cache bytes per token, without what Mixture-of-Depths skips. `options` are those
    of `costs`."""
    mod = MoD.of(blueprint.config.scheme, blueprint.config.model.mod, blueprint.config.model.context)
    return costs(blueprint.config.model, blueprint.parameters, mod.router.name, mod.decider.name, **options)


def run_facts(blueprint: ModelBlueprint) -> dict:
    """The content of a run's info.json."""
    parts, each = parameters_by_part(blueprint), model_costs(blueprint)
    packages = ("nagjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    return {
        "parameters": sum(parts.values()),
        "trained_parameters": count_trained(blueprint.parameters),
        "parameters_by_part": parts,
        "executed_parameters_per_token": each.executed_parameters,
        "forward_flops_per_token": each.forward,
        "train_flops_per_token": each.train,
        "kv_bytes_per_token": each.kv_bytes,
        "mod_rate": mod_rates(blueprint.config.model),
        "device": blueprint.mesh.devices.flat[0].device_kind,
        "devices": blueprint.mesh.size,
        "cpu": processor(),
        "mesh": dict(blueprint.mesh.shape),
        "judged_by": {name: getattr(blueprint.config.train, name) for name in JUDGEMENT},
        "versions": versions(packages),
        "commit": commit(),
        "date": now(),
    }


def changed_surroundings(folder: Path, facts: dict) -> str:
    """The versions, devices, and settings for bad steps in which `facts` differ from the run's info.json, in words; ""
    if none differ."""
    try:
        old = read_json(folder / INFO)
        flat_old, flat_new = (_surroundings(values) for values in (old, facts))
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return ""
    names = [name for name in flat_new if name in flat_old and flat_old[name] != flat_new[name]]
    return ", ".join(f"{name} {flat_new[name]} (was {flat_old[name]})" for name in names)


def _surroundings(facts: dict) -> dict:
    known = ("device", "devices", "cpu", "mesh", "commit")
    found = {name: facts[name] for name in known if name in facts} | facts["versions"]
    found |= {f"train.{name}": value for name, value in facts.get("judged_by", {}).items()}  # older: none
    mesh = {axis: size for axis, size in found.get("mesh", {}).items() if size > 1}  # versions know other axes
    return found | ({"mesh": mesh} if "mesh" in found else {})
