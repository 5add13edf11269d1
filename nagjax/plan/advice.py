"""Suggests changes to a run that does not fit into memory, with the memory that each would save."""

import itertools

from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.plan.search import LEAST_TOKENS
from nagjax.plan.units import gigabytes
from nagjax.runs.config import from_dict
from nagjax.train.distributed.mesh import check_experts, check_sequence

AGAIN = {"dots": "everything but matmuls", "block": "every block"}


def advise(result: dict) -> list[str]:
    """The options to change, the one with the largest saving first. `result` is a plan whose program exceeds the
    memory."""
    by_axis = _sharding(result), _tensor(result), _sequence(result)
    parts = (*by_axis, _recomputation(result), _batch(result), _chips(result))
    found = sorted(itertools.chain(*parts), key=lambda advice: -advice[0])
    return [text for _, text in found] or ["more chips, a shorter --context or a smaller model"]


def _state(result: dict) -> int:
    return result["memory"]["parameters"] + result["memory"]["optimizer"]


def _sharding(result: dict) -> list[tuple[int, str]]:
    data, fsdp, state = result["mesh"]["data"], result["mesh"]["fsdp"], _state(result)
    if data == 1:
        return []
    flags = f"--mesh.data 1 --mesh.fsdp {fsdp * data}"
    then = state // data
    return [(state - then, f"{flags}: parameters and optimizer fall from {gigabytes(state)} to {gigabytes(then)}")]


def _recomputation(result: dict) -> list[tuple[int, str]]:
    saved, policies = result["memory"]["saved"], result.get("saved_by_remat", {})
    return [
        (
            saved - policies[name],
            f"--remat {name}: what is saved for the backward pass falls from {gigabytes(saved)} to "
            f"{gigabytes(policies[name])}; the backward pass computes {AGAIN[name]} again",
        )
        for name in ("dots", "block")
        if name in policies and policies[name] < 0.95 * saved
    ]


def _rows(result: dict) -> int:
    """The number of sequences that a device processes at once."""
    train, mesh = result["config"]["train"], result["mesh"]
    return train["batch"] // train["accumulate"] // (mesh["data"] * mesh["fsdp"] * mesh.get("expert", 1))


def _batch(result: dict) -> list[tuple[int, str]]:
    rows, train, saved = _rows(result), result["config"]["train"], result["memory"]["saved"]
    if rows <= 1:
        return []
    step = next(n for n in range(2, rows + 1) if rows % n == 0)
    parts = f"--accumulate {train['accumulate'] * step}: the batch goes through in more parts, activations fall to 1/"
    found = [(saved - saved // step, f"{parts}{step} (at most {train['accumulate'] * rows} parts)")]
    if rows % 2 == 0:
        found.append((saved // 2, f"--batch {train['batch'] // 2}: half the activations, another batch"))
    return found


def _tensor(result: dict) -> list[tuple[int, str]]:
    mesh, heads = result["mesh"], result["config"]["model"]["heads"]
    wider = 2 * mesh["tensor"]
    if _rows(result) > 1 or heads % wider or mesh["fsdp"] % 2 or wider > 8:
        return []
    flags = f"--mesh.tensor {wider} --mesh.fsdp {mesh['fsdp'] // 2} --batch {result['config']['train']['batch'] // 2}"
    return [(0, f"{flags}: heads, hidden features and logits of a sequence split over {wider} chips")]


def _sequence(result: dict) -> list[tuple[int, str]]:
    mesh, batch = result["mesh"], result["config"]["train"]["batch"]
    model, parts = from_dict(ModelConfig, result["config"]["model"]), 2 * mesh.get("sequence", 1)
    if _rows(result) > 1 or mesh["fsdp"] % 2 or model.context // parts < LEAST_TOKENS:
        return []
    try:
        check_sequence(model, {"sequence": parts})
        check_experts(model, {"expert": mesh.get("expert", 1), "sequence": parts})
    except UserError:
        return []
    flags = f"--mesh.sequence {parts} --mesh.fsdp {mesh['fsdp'] // 2} --batch {batch // 2}"
    return [(result["memory"]["saved"] // 2, f"{flags}: the tokens of a sequence split over {parts} chips")]


def _chips(result: dict) -> list[tuple[int, str]]:
    state, capacity = _state(result), result["memory"]["capacity"]
    if state <= capacity or result["mesh"]["data"] > 1:
        return []
    return [(state, f"more chips: parameters and optimizer alone are {gigabytes(state)} of {gigabytes(capacity)} each")]
