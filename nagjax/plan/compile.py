"""Plans one run: starts a compiler process with a time limit, and adds bounds and advice to its result."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nagjax.errors import UserError
from nagjax.files import read_json
from nagjax.plan.advice import advise
from nagjax.plan.order import choose, mesh_shape, options
from nagjax.plan.roofline import Roofline, throughput
from nagjax.plan.topology import Topology, require
from nagjax.runs.config import RunConfig, to_dict
from pallas_kernels.aot.targets import compilers_environment

WORKER = (sys.executable, "-m", "nagjax.plan.worker")
REMATERIALISED = "Involuntary full rematerialization"


def plan(
    config: RunConfig,
    topology: Topology,
    *,
    seconds: float,
    dollars_per_hour: float | None = None,
) -> dict:
    """Plans this run on this topology. Returns plain JSON values, per device unless their names say otherwise.
    `seconds` is the time limit of the compiler, `dollars_per_hour` the price of one chip.

    Raises UserError for bad options, for a missing compiler, and for a compiler that crashed or took longer than
    `seconds`. A run that does not fit is not an error: its result contains advice.
    """
    shape = mesh_shape(config, topology)
    require(topology)
    explicit, choices = choose(config, topology)
    found = run_worker(json.dumps({"topology": topology.name, "config": to_dict(explicit)}), seconds)
    chip, tokens = topology.chip, config.train.batch * config.model.context
    result = {
        "topology": topology.name,
        "chips": topology.size,
        "chip": {
            "name": chip.title,
            "flops": chip.flops,
            "bandwidth": chip.bandwidth,
            "egress": topology.egress,
            "source": chip.source,
            "memory": chip.memory_note,
        },
        "options": options(config, shape),
        "config": to_dict(explicit),
        "choices": dataclasses.asdict(choices),
        "tokens_per_step": tokens,
        **found,
    }
    if "flops" in found:
        result |= bounds(found, topology, tokens, dollars_per_hour)
    if not found["fits"]:
        result["advice"] = advise(result)
    return result


def bounds(found: dict, topology: Topology, tokens: int, dollars_per_hour: float | None) -> dict:
    """The roofline of the compiled step, and the throughput and cost that follow from it."""
    roofline = Roofline.of(topology, found["flops"], found["moved"], found["sent"])
    rate = throughput(roofline.seconds, tokens, topology.size, dollars_per_hour)
    return {
        "bound": {**dataclasses.asdict(roofline), "seconds": roofline.seconds, "limit": roofline.limit},
        "intensity": found["flops"] / found["moved"],
        "dollars_per_hour": dollars_per_hour,
        "highest_mfu": found["model_flops_per_token"] * rate["tokens_per_second_per_chip"] / topology.chip.flops,
        **rate,
    }


def run_worker(order: str, seconds: float, worker: Sequence[str] | None = None) -> dict:
    """The worker's answer to an order. Raises UserError if it fails, dies, or takes longer than `seconds`."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = compilers_environment() | {"PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "result.json"
        try:
            done = subprocess.run(
                [*(worker or WORKER), str(answer)],
                input=order,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                "minutes", seconds / 60, "the compiler was stopped at this time limit: give more (--minutes)"
            ) from None
        if not answer.exists():
            raise UserError(
                "plan", _ending(done.returncode), f"the compiler's process ended: {_last_line(done.stderr)}"
            )
        found = read_json(answer, lenient=True)
    if "error" in found:
        raise UserError("plan", "compiler", found["error"])
    found["involuntary_rematerializations"] = done.stderr.count(REMATERIALISED)
    return found


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = ", perhaps because the machine ran out of memory" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it printed nothing"
