"""Tries meshes, remat policies and numbers of batch parts (`--accumulate`), and ranks the plans that fit."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from nagjax.errors import UserError
from nagjax.plan.order import mesh_shape, options
from nagjax.plan.topology import Topology
from nagjax.runs.config import MeshConfig, RunConfig

REMATS = ("none", "dots", "block")  # the least recomputation first
TENSORS = (1, 2, 4, 8)
SEQUENCES = (1, 2, 4, 8)
EXPERTS = (1, 2, 4, 8)
LEAST_TOKENS = 2048  # of a sequence on one device: for shorter parts, gathering keys and values costs too much
PARTS = (1, 2, 4, 8, 16)


def meshes(config: RunConfig, topology: Topology) -> list[MeshConfig]:
    """Meshes worth trying, those with the fewest axes first. Tensor parallelism is at most the number of heads, and
    only long sequences are split."""
    found, model = [], config.model
    for tensor, sequence, expert in itertools.product(TENSORS, SEQUENCES, EXPERTS):
        if topology.size % (tensor * sequence * expert) or model.heads % tensor:
            continue
        if expert > 1 and (not model.moe.experts or model.moe.experts % expert):
            continue
        if sequence > 1 and (model.context % sequence or model.context // sequence < LEAST_TOKENS or model.mod.active):
            continue
        rest = topology.size // (tensor * sequence * expert)
        for fsdp in (2**i for i in range(rest.bit_length())):
            if rest % fsdp == 0 and config.train.batch % (rest * expert) == 0:
                mesh = MeshConfig(data=rest // fsdp, fsdp=fsdp, tensor=tensor, sequence=sequence, expert=expert)
                found.append(mesh)
    axes = lambda m: sum(n > 1 for n in dataclasses.astuple(m))  # noqa: E731
    return sorted(found, key=lambda m: (axes(m), m.tensor * m.sequence * m.expert, m.tensor, -m.fsdp))


def candidates(config: RunConfig, mesh: MeshConfig, topology: Topology) -> Iterator[list[RunConfig]]:
    """For each remat policy, its configs with an increasing number of batch parts, until a device processes one
    sequence at a time or there are 16 parts."""
    for remat in REMATS:
        ladder = []
        for parts in PARTS:
            if config.train.batch % parts:
                continue
            model = dataclasses.replace(config.model, remat=remat)
            train = dataclasses.replace(config.train, accumulate=parts)
            one = dataclasses.replace(config, model=model, train=train, mesh=mesh)
            try:
                mesh_shape(one, topology)
            except UserError:
                continue
            ladder.append(one)
        yield ladder


def search(
    config: RunConfig,
    topology: Topology,
    plan: Callable[[RunConfig], dict],
    tries: int,
    tell: Callable[[str], None] = print,
) -> list[dict]:
    """The plans of at most `tries` candidates.

    On each mesh the policies are tried from the least recomputation to the most, each with the fewest batch parts that
    fit, up to the first policy that fits in one part. Policies after it only add recomputation, although their bound
    may be lower if they save bytes moved. A mesh is skipped if the state alone does not fit.
    """
    found: list[dict] = []
    for mesh in meshes(config, topology):
        for ladder in candidates(config, mesh, topology):
            last: dict = {}
            for one in ladder:
                if len(found) == tries:
                    tell(f"stopped after {tries} tries; --tries gives more")
                    return found
                try:
                    last = plan(one)
                except UserError as error:
                    last = {"options": options(one, mesh_shape(one, topology)), "fits": False, "error": error.fix[:160]}
                found.append(last)
                tell(f"{len(found)}/{tries} {'fits' if last['fits'] else 'does not fit'}: {last['options']}")
                if last["fits"] or "error" in last or _state_alone(last):
                    break
            if last and (_state_alone(last) or (last["fits"] and last["config"]["train"]["accumulate"] == 1)):
                break
    return found


def _state_alone(result: dict) -> bool:
    memory = result.get("memory")
    return bool(memory) and memory["parameters"] + memory["optimizer"] > memory["capacity"]
