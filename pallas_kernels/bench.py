"""Time every op: `python -m pallas_kernels.bench [--json FILE] [--op NAME] [--repeats N]`.

The figures for each op, implementation and shape of `shapes.BENCH` are: microseconds of the forward pass and of forward
plus backward (with a barrier between the two), the bandwidth computed from the bytes that the op must move
(`bytes_moved`), its ratio to the bandwidth of a plain copy measured in the same run, and the time relative to XLA's own
compilation of the reference. The time of the backward pass alone is the difference of the two times, if this is
positive. Row ops are timed without donated operands, so XLA first copies the stream into which they write: their
bandwidth is not shown. A time with "(host)" is what the host needs to start the call: the device waited for it.

On a CPU the shapes are small, and the figures only show that everything runs.
"""

import argparse
import functools
import json
import pathlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import shapes
from pallas_kernels.dispatch import REFERENCE, Op, choose, here, run
from pallas_kernels.ops import all_ops
from pallas_kernels.origin import origin
from pallas_kernels.shapes import Sample, sample
from pallas_kernels.timing import ROTATE_BYTES, Taken, copy_bandwidth, timed

COLUMNS = ("op", "shape", "implementation", "pass", "us", "GB/s", "of copy", "vs reference")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="also write the figures to FILE")
    parser.add_argument("--op", action="append", choices=sorted(all_ops()), help="only this op; may be repeated")
    parser.add_argument("--repeats", type=int, default=20, help="timings per figure, of which the median is taken")
    options = parser.parse_args(argv)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: give at least 1")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # before anything is measured

    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    rotate = 0 if on_cpu else ROTATE_BYTES
    copy = copy_bandwidth(rotate=rotate, repeats=options.repeats)
    print(f"{device.device_kind}: a plain copy reaches {copy:.0f} GB/s")
    if on_cpu:
        print("CPU: small shapes, wall time; nothing here says how fast the kernels are on an accelerator")
    print(_line(COLUMNS))
    rows = []
    for name in options.op or sorted(all_ops()):
        for shape in shapes.BENCH_CPU if on_cpu else shapes.BENCH:
            for row in bench(name, shape, rotate=rotate, repeats=options.repeats):
                if "error" in row:
                    rows.append(row)
                    print(f"| {name} | {shape} | {row['implementation']} failed: {row['error']}", flush=True)
                    continue
                row["of_copy"] = row["GB/s"] and row["GB/s"] / copy
                rows.append(row)
                print(_line(_cells(row)), flush=True)
    if options.json:
        facts = origin() | {"repeats": options.repeats, "copy_GB/s": copy}
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1))


def bench(name: str, shape: tuple[int, int, str], *, rotate: int, repeats: int) -> Iterator[dict]:
    """Yields the figures of one op at one shape: the reference first, then every implementation that runs here. An
    implementation that fails has a row with `error`; if only its gradients fail, it also has the figures of the forward
    pass."""
    op, of = all_ops()[name], sample(name, *shape)
    reference: dict[str, Taken] = {}
    for implementation in (REFERENCE, *op.implementations):
        if not runs_here(op, implementation, of):
            continue
        row = {"op": name, "shape": list(shape), "implementation": implementation}
        try:
            times, failed = by_pass(name, implementation, shape, rotate=rotate, repeats=repeats)
        except Exception as error:  # the other implementations still have figures
            yield row | {"error": in_one_line(error)}
            continue
        if failed:
            yield row | {"error": in_one_line(failed)}
        reference = times if implementation == REFERENCE else reference
        for what, own in times.items():
            yield row | {"pass": what} | figures(own, reference.get(what)) | {"GB/s": bandwidth(name, shape, what, own)}


def figures(own: Taken, reference: Taken | None) -> dict:
    """`us` (microseconds), `vs_reference`, and `host_time` if the time is the host's."""
    found = {"us": 1e6 * own.seconds, "vs_reference": own.seconds / reference.seconds if reference else None}
    return found | ({"host_time": True} if own.by_host else {})


def by_pass(
    name: str, implementation: str, shape: tuple[int, int, str], *, rotate: int, repeats: int
) -> tuple[dict[str, Taken], Exception | None]:
    """The time of each pass, and the error of the gradients, if any; then only the forward pass has a time. "backward"
    is left out if noise made the difference negative."""
    op, of = all_ops()[name], sample(name, *shape)
    (what, fn, make), (both, gradients, make_both) = _programs(op, implementation, of)
    times = {what: timed(fn, make, rotate=rotate, repeats=repeats)}
    try:
        times[both] = timed(gradients, make_both, rotate=rotate, repeats=repeats)
    except Exception as error:
        return times, error
    difference = Taken(times[both].seconds - times[what].seconds, times[both].by_host or times[what].by_host)
    return times | ({"backward": difference} if difference.seconds > 0 else {}), None


def bandwidth(name: str, shape: tuple[int, int, str], what: str, taken: Taken) -> float | None:
    """GB/s of the bytes of one visit of every tensor; None for row ops. For all implementations these are the bytes of
    the TPU kernels, which add the least to those of the tensors."""
    op, sizes = all_ops()[name], sample(name, *shape).sizes
    if sizes is None:
        return None
    moved = [op.implementations["mosaic_tpu"].bytes_moved(*shape, *sizes, backward=b) for b in (False, True)]
    return {"forward": moved[0], "backward": moved[1], "forward+backward": sum(moved)}[what] / taken.seconds / 1e9


def _programs(op: Op, implementation: str, of: Sample) -> Iterator[tuple[str, Callable, Callable]]:
    def forward(*args):
        return run(op, implementation, *args, **of.constants)

    both = functools.partial(_one_after_the_other, forward)
    outputs = jax.eval_shape(forward, *of.args)
    yield "forward", forward, lambda key: arrays(key, of.args)
    yield "forward+backward", both, lambda key: (arrays(key, of.args), arrays(key, outputs))


def with_gradients(forward: Callable, args: tuple, cotangents: tuple) -> list[jax.Array]:
    """Outputs, then gradients."""
    return _pulled(*jax.vjp(forward, *args), cotangents)


def _one_after_the_other(forward: Callable, args: tuple, cotangents: tuple) -> list[jax.Array]:
    """`with_gradients`, with a barrier between the passes as in a training step: otherwise XLA would fuse them and read
    operands once."""
    return _pulled(*jax.lax.optimization_barrier((*jax.vjp(forward, *args), cotangents)))


def _pulled(outputs: tuple, pull: Callable, cotangents: tuple) -> list[jax.Array]:
    return [*outputs, *(g for g in pull(cotangents) if g.dtype != jax.dtypes.float0)]


def arrays(key: jax.Array, like: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.Array, ...]:
    """Arrays of normal random numbers; integer arrays are distinct indices into the rows of the first array."""

    def array(key, x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            order = jax.vmap(lambda k: jax.random.permutation(k, like[0].shape[1]))
            return order(jax.random.split(key, x.shape[0]))[:, : x.shape[1]].astype(x.dtype)
        return jax.random.normal(key, x.shape, x.dtype)

    return tuple(array(k, x) for k, x in zip(jax.random.split(key, len(like)), like, strict=True))


def in_one_line(error: Exception) -> str:
    """The error as one line of at most about 400 characters, for a file of results: compilers write pages."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def runs_here(op: Op, implementation: str, of: Sample) -> bool:
    try:
        return choose(op, implementation, *of.args, **of.constants).on(here()) is not None
    except ValueError:
        return False


def _cells(row: dict) -> tuple[str, ...]:
    rows, width, dtype = row["shape"]
    bandwidth = f"{row['GB/s']:.0f}" if row["GB/s"] else "-"
    share = f"{row['of_copy']:.0%}" if row["of_copy"] else "-"
    shape = f"{rows}x{width} {dtype}"
    ratio = f"{row['vs_reference']:.2f}" if row["vs_reference"] else "-"
    time = f"{row['us']:.1f}" + " (host)" * ("host_time" in row)
    return row["op"], shape, row["implementation"], row["pass"], time, bandwidth, share, ratio


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, (20, 20, 14, 16, 14, 6, 7, 12), strict=True)) + " |"


if __name__ == "__main__":
    main()
