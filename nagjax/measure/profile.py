"""Time of a training step by part of the model.

The profiler names instructions of the compiled step; the compiled step says from which `jax.named_scope` each one came.
An instruction that the compiler fused from several parts counts for the part after which it is named.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.profiler import ProfileData

from nagjax.data import batches, open_dataset
from nagjax.errors import UserError
from nagjax.layers.platform import platform_of
from nagjax.runs.config import RunConfig
from nagjax.train.distributed.mesh import check_rows, make_mesh
from nagjax.train.evaluator import put
from nagjax.train.facts import resolve
from nagjax.train.loss import Batch
from nagjax.train.state import Blueprint
from nagjax.train.step import jit_train_step
from pallas_kernels.hlo import parse

SCOPES = ("embedding", "attention", "mlp", "residual", "routing", "head", "optimizer")
OTHER = "other"
WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
_CONTROL = ("while", "conditional", "call")  # their time is that of the instructions inside them
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def scope_of(op_name: str) -> str:
    """The innermost part in an operation's path: `jit(step)/transpose(jvp(attention))/residual/mul` is `residual`."""
    found = [word for word in re.findall(r"\w+", op_name) if word in SCOPES]
    return found[-1] if found else OTHER


def scopes_of(hlo: str) -> dict[str, str]:
    """The part of every instruction, by instruction name, for all instructions of a compiled program's text that do
    work of their own."""
    work = (i for i in parse(hlo).instructions() if i.opcode not in _CONTROL)
    return {i.name: scope_of("".join(_OP_NAME.findall(i.attributes))) for i in work}


def times_by_scope(files: Iterator[Path], scopes: dict[str, str]) -> Counter[str]:
    """Nanoseconds by part, summed over all devices and steps of a trace (its `.xplane.pb` files). If devices have
    planes of their own, as all but CPUs do, the host's time to start their instructions does not count."""
    planes = [plane for file in files for plane in ProfileData.from_file(str(file)).planes]
    planes = [plane for plane in planes if plane.name.startswith("/device:")] or planes
    found: Counter[str] = Counter()
    for event in (event for plane in planes for line in plane.lines for event in line.events):
        name = next((str(value) for key, value in event.stats if key == "hlo_op"), event.name)
        if (scope := scopes.get(name)) is not None:
            found[scope] += event.duration_ns
    return found


def profile(config: RunConfig, folder: Path, steps: int) -> dict:
    """Runs `trace_steps` for a new model on a batch of its corpus."""
    config = resolve(config)
    blueprint = Blueprint.of(config, make_mesh(config.mesh))
    check_rows(config.train.batch, config.train.accumulate, blueprint.mesh.shape)
    text = batches(open_dataset(config.data), batch=config.train.batch, context=config.model.context)
    return trace_steps(blueprint, put(blueprint, next(iter(text))), folder, steps)


def trace_steps(blueprint: Blueprint, batch: Batch, folder: Path, steps: int) -> dict:
    """Traces `steps` training steps from initial parameters into `folder`, and returns milliseconds by part.

    On NVIDIA GPUs kernels are started one by one, because the profiler cannot tell which instruction a kernel of a CUDA
    graph belongs to (openxla/xprof#3070).

    The result has `steps`, `devices`, `milliseconds` (wall time of a step), and `scopes` (for each part the
    milliseconds of its instructions per step and device; on a CPU instructions run in parallel and may add up to more
    than the step). Raises UserError for less than one step, or if the profiler recorded no instructions.
    """
    if steps < 1:
        raise UserError("traced", steps, "trace at least 1 step")
    state = blueprint.create()
    options = WITHOUT_GRAPHS if platform_of(blueprint.mesh) == "gpu" else None
    step = jit_train_step(blueprint).lower(state, batch).compile(options)
    state, metrics = step(state, batch)  # not traced: the first step is slower
    jax.block_until_ready(metrics)
    before = set(folder.rglob("*.xplane.pb"))
    with jax.profiler.trace(folder):
        began = time.perf_counter()
        for number in range(steps):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - began
    found = times_by_scope((f for f in folder.rglob("*.xplane.pb") if f not in before), scopes_of(step.as_text()))
    if not found:
        seen = {plane.name for f in folder.rglob("*.xplane.pb") for plane in ProfileData.from_file(str(f)).planes}
        fix = f"the profiler recorded no instructions on this device, only {sorted(seen)}: open the trace"
        raise UserError("profile", str(folder), fix)
    count = blueprint.mesh.size
    each = {name: 1e-6 * found[name] / steps / count for name in (*SCOPES, OTHER) if found[name]}
    return {"steps": steps, "devices": count, "milliseconds": 1e3 * seconds / steps, "scopes": each}


def report(result: dict) -> str:
    """The result as a table, the slowest part first."""
    total = sum(result["scopes"].values())
    rows = sorted(result["scopes"].items(), key=lambda row: -row[1])
    return "\n".join(
        [
            f"one step: {result['milliseconds']:.2f} ms by the clock, its instructions {total:.2f} ms per device",
            *(f"{name:10} {own:10.3f} ms  {own / total:6.1%}" for name, own in rows),
        ]
    )
