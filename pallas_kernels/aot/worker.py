"""Compiles cases for one target, in a process of its own: `python -m pallas_kernels.aot.worker`.

Reads `{"target": name, "cases": [...]}` from standard input and writes one JSON line per event: `{"ready":
true}` when the compiler is loaded, `{"begin": index}` before a case and `{"end": index, ...}` after it.
The process that started it stops it when a case takes too long.
"""

import importlib
import json
import sys
import time
from functools import partial

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.aot.amd import compile_for_amd
from pallas_kernels.aot.cases import Case, estimated_bytes, measure, program
from pallas_kernels.aot.ptx import assembling, figures, listening
from pallas_kernels.aot.step import training_step
from pallas_kernels.aot.targets import TARGETS, Target, devices


def compile_case(case: Case, target: Target, chips: list) -> dict:
    """Compiles one case for the target and measures it. A problem of a kernel is listed in the result; an error of the
    compiler is raised."""
    if target.platform == "rocm":
        return compile_for_amd(case, target)
    if case.verb == "step":
        module, _, function = case.op.rpartition(":")
        step = getattr(importlib.import_module(module), function) if module else partial(training_step, function)
        fn, args, mesh = step(chips, case.implementation)
    else:
        mesh = Mesh(np.array(chips[:1]), ("one",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):  # also tells kernels which chip they are traced and lowered for
        estimate = None
        if case.verb != "step":
            fn, args = program(case)
            estimate = estimated_bytes(fn, args)
            whole = NamedSharding(mesh, P())
            args = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole) for a in args)
        start = time.perf_counter()
        with assembling() as assembled, listening() as said:
            compiled = jax.jit(fn).trace(*args).lower(lowering_platforms=(target.platform,)).compile()
            of_kernel = figures(said(), case.op)
        seconds = round(time.perf_counter() - start, 2)
    found = measure(case, compiled.as_text(), estimate, target.best if case.implementation == "best" else None)
    problems = found["problems"] + assembled["problems"]
    if case.implementation == "mosaic_gpu" and of_kernel.get("spilled"):
        problems.append(f"{of_kernel['spilled']} bytes spilled by every thread")
    return assembled | of_kernel | found | {"problems": problems, "seconds": seconds}


def main() -> None:
    order = json.load(sys.stdin)
    target = TARGETS[order["target"]]
    chips = devices(target)
    _say(ready=True)
    for index, fields in enumerate(order["cases"]):
        _say(begin=index)
        try:
            result = compile_case(Case(**fields), target, chips)
        except Exception as error:  # every failure of a compiler is a result
            result = {"problems": [f"{type(error).__name__}: {str(error)[:2000]}"]}
        _say(end=index, **result)


def _say(**message) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
