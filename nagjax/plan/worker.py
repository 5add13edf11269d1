"""Compiles one training step for one topology, in a process of its own: `python -m nagjax.plan.worker RESULT`.

Reads the order from standard input and writes one JSON object to the file RESULT. The process that started this one
stops it if it takes too long.
"""

import dataclasses
import json
import math
import re
import resource
import sys
import time
from pathlib import Path

import jax
from jax.sharding import Mesh

from nagjax.json_reader import parse_json
from nagjax.layers.platform import tracing_for
from nagjax.plan.account import account
from nagjax.plan.saved import saved_bytes
from nagjax.plan.topology import Topology
from nagjax.plan.topology import parse as parse_topology
from nagjax.runs.config import RunConfig, from_dict
from nagjax.runs.facts import model_costs
from nagjax.runs.trained import count_trained
from nagjax.train.abstract_step import training_step
from nagjax.train.loss import Batch
from nagjax.train.state import Blueprint, TrainState
from pallas_kernels.hlo import parse

OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|(?i:out of memory)")
UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_step(config: RunConfig, topology: Topology) -> dict:
    """Figures of the compiled step, per device. If the compiler refuses the step for lack of memory, `needed` (bytes)
    takes the place of the compiler's figures. If the step compiles although it is too large, the figures are there, and
    `fits` is False."""
    devices = topology.devices()
    step, args, mesh = training_step(config, devices)
    result = stated(config, args, mesh) | {"fits": False}
    memory = result["memory"]
    memory["capacity"] = topology.chip.memory
    with jax.set_mesh(mesh), tracing_for(topology.chip.platform):  # chooses kernels and attention for that chip
        began = time.perf_counter()
        traced = step.trace(*args)
        memory["saved"] = _saved(config, traced, mesh)
        if config.model.remat == "offload":
            memory["saved_on_host"] = _saved(config, traced, mesh, jax.memory.Space.Host)
        lowered = traced.lower(lowering_platforms=(topology.chip.platform,))
        result["seconds_to_lower"] = round(time.perf_counter() - began, 1)
        began = time.perf_counter()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if not OUT_OF_MEMORY.search(str(error)) or "vmem" in str(error)[:600].lower():
                raise
            memory["needed"], result["refusal"] = needed(str(error)), str(error).splitlines()[0][:400]
        else:
            result |= _measured(compiled, memory, topology)
        result["seconds_to_compile"] = round(time.perf_counter() - began, 1)
    if not result["fits"]:
        with tracing_for(topology.chip.platform):
            result["saved_by_remat"] = _saved_by_remat(config, devices)
    result["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result["jax"] = jax.__version__
    return result


def stated(config: RunConfig, args: tuple[TrainState, Batch], mesh: Mesh) -> dict:
    """What is known without compiling: parameters, FLOPs of the model, and bytes of one device's state and batch."""
    state, batch = args
    blueprint = Blueprint.of(config, mesh)
    each = model_costs(blueprint)
    return {
        "mesh": dict(mesh.shape),
        "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(state.params)),
        "trained_parameters": count_trained(blueprint.parameters),
        "executed_parameters": each.executed_parameters,
        "model_flops_per_token": each.train,
        "memory": {
            "parameters": _bytes(state.params),
            "optimizer": _bytes((state.optimizer, state.average)),
            "batch": _bytes(batch),
        },
    }


def _measured(compiled, memory: dict, topology: Topology) -> dict:
    stats = compiled.memory_analysis()
    memory["peak"] = int(stats.peak_memory_in_bytes) + int(stats.generated_code_size_in_bytes)
    found = account(parse(compiled.as_text()), topology.size)
    return {
        "fits": memory["peak"] <= memory["capacity"],
        "flops": found.flops,
        "moved": found.moved,
        "sent": found.sent,
        "collectives": {kind: dataclasses.asdict(c) for kind, c in sorted(found.collectives.items())},
        "kernels": found.kernels,
    }


def needed(message: str) -> int | None:
    """The bytes that a program needs according to the compiler's error message; None if the message does not say."""
    for pattern in (
        r"[Uu]sed ([\d.]+)([KMGT]?) of",
        r"temporaries \(([\d.]+)([KMGT]?)\)",
        r"allocate ([\d.]+)([KMGT]?)i?B",
    ):
        if found := re.search(pattern, message):
            return int(float(found[1]) * UNITS[found[2]])
    return None


def _saved(config: RunConfig, traced, mesh, space=jax.memory.Space.Device) -> int:
    return saved_bytes(traced.jaxpr.jaxpr, config.train.batch // config.train.accumulate, dict(mesh.shape), space)


def _saved_by_remat(config: RunConfig, devices: list) -> dict[str, int]:
    """The bytes that the scan would keep with each policy that recomputes something."""
    found = {}
    for remat in ("dots", "block"):
        other = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))
        step, args, mesh = training_step(other, devices)
        with jax.set_mesh(mesh):
            found[remat] = _saved(other, step.trace(*args), mesh)
    return found


def _bytes(tree) -> int:
    """Bytes of one device's shards of the arrays."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def main() -> None:
    order = parse_json(sys.stdin.read())
    config = from_dict(RunConfig, order["config"])
    try:
        result = compile_step(config, parse_topology(order["topology"]))
    except Exception as error:  # a plan reports every failure of the compiler
        result = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
