"""Part `kernels`: time of every op by every implementation that runs here, and of peers, at the widths of models.

Bandwidth is that of the bytes an op cannot avoid, as a share of a plain copy's in the same run. `vs_reference` is the
time over that of XLA's own compilation of the reference.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import time
from collections.abc import Iterator

import jax

from benchmarks.parts.rows import FAILED, Case, Options
from pallas_kernels.bench import arrays, bench, runs_here
from pallas_kernels.dispatch import run
from pallas_kernels.ops import all_ops
from pallas_kernels.shapes import sample
from pallas_kernels.timing import ROTATE_BYTES, copy_bandwidth

WIDTHS = (1024, 640, 2048, 4096, 8192)
ROWS = 16384
REPEATS = 10
FIRST = ("nag_update_modulated", "nag_update", "add_rms_norm", "review_update")
IN_PLACE = ("put_rows", "nag_update_rows")


def cases(options: Options) -> Iterator[Case]:
    """The kernel that NAG trains with comes first, and every op at one width before the next."""
    wanted = [(64, 64, "float32")] if options.rehearsal else [(ROWS, width, "bfloat16") for width in WIDTHS]
    ops = sorted(all_ops(), key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    for shape in wanted:
        named = dict(zip(("rows", "width", "dtype"), shape, strict=True))
        for name in ops:
            yield Case({"op": name, **named}, functools.partial(measure, name, shape))
            if name in IN_PLACE:
                yield Case({"op": name, "donated": True, **named}, functools.partial(donated, name, shape))
        if jax.devices()[0].platform == "gpu" and importlib.util.find_spec("torch"):
            yield Case({"op": "add_rms_norm", "peers": True, **named}, functools.partial(peers, shape))


def measure(name: str, shape: tuple[int, int, str]) -> dict:
    """By implementation and pass: `us`, `of_copy`, `vs_reference`. An implementation that fails is in `failed`."""
    found: dict[str, dict] = {}
    failed: dict[str, str] = {}
    for row in bench(name, shape, rotate=_rotate(), repeats=REPEATS):
        if "error" in row:
            failed[row["implementation"]] = row["error"]
            continue
        share = row["GB/s"] and row["GB/s"] / copy()
        figures = {"us": row["us"], "of_copy": share, "vs_reference": row["vs_reference"]}
        found.setdefault(row["implementation"], {})[row["pass"]] = figures
    return {"implementations": found, "copy_GB/s": copy()} | ({FAILED: failed} if failed else {})


def peers(shape: tuple[int, int, str]) -> dict:
    """`benchmarks.parts.peers`, which imports PyTorch."""
    from benchmarks.parts import peers

    return peers.measure(shape, copy())


def donated(name: str, shape: tuple[int, int, str]) -> dict:
    """Forward time of an op that writes into a stream it owns, as it does inside a training step: of one program that
    visits so many streams that none is still in a cache."""
    op, of = all_ops()[name], sample(name, *shape)
    found = {}
    for implementation in ("reference", *op.implementations):
        if not runs_here(op, implementation, of):
            continue
        stream, *rest = arrays(jax.random.key(0), of.args)
        count = max(-(-_rotate() // stream.nbytes), 1)
        streams = [stream.copy() for _ in range(count)]

        @functools.partial(jax.jit, donate_argnums=0)
        def program(streams, rest, implementation=implementation):
            return [run(op, implementation, stream, *rest, **of.constants)[0] for stream in streams]

        times = []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            streams = jax.block_until_ready(program(streams, rest))
            times.append((time.perf_counter() - began) / count * 1e6)
        found[implementation] = {"forward": {"us": statistics.median(times[1:])}}
    return {"implementations": found}


@functools.cache
def copy() -> float:
    """GB/s of a plain copy on this device."""
    return copy_bandwidth(rotate=_rotate(), repeats=REPEATS)


def _rotate() -> int:
    return 0 if jax.devices()[0].platform == "cpu" else ROTATE_BYTES
