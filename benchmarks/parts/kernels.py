"""Part `kernels`: the time of every op in every implementation that runs here, and of peers, at the widths of models.

Bandwidth counts only the bytes that an op cannot avoid, and is given as a share of a plain copy's in the same run.
`vs_reference` is the time relative to XLA's own compilation of the reference in the same process.
"""

import functools
import importlib.util
from collections.abc import Iterator

import jax

from benchmarks.parts.rows import Case, Options
from pallas_kernels.bench import arrays, bandwidth, by_pass, figures, in_one_line, runs_here
from pallas_kernels.dispatch import REFERENCE, run
from pallas_kernels.ops import all_ops
from pallas_kernels.shapes import sample
from pallas_kernels.timing import ROTATE_BYTES, Taken, copy_bandwidth, size, taken

WIDTHS = (1024, 640, 4096), (2048, 8192)  # those of the second tuple follow after all ops at 1024
ROWS = 16384
REPEATS = 10
PEERS_SECONDS = 120.0  # the limit of its case, because torch takes longer than others to compile
FIRST = ("nag_update_modulated", "nag_update", "add_rms_norm", "review_update")
IN_PLACE = ("put_rows", "nag_update_rows")
_references: dict[tuple[str, tuple[int, int, str]], dict[str, Taken]] = {}  # by pass, in this process


def cases(options: Options) -> Iterator[Case]:
    """First the kernel that NAG trains with; ops on whole streams come before those on rows."""
    others = tuple(name for name in all_ops() if name not in FIRST)
    first, then = WIDTHS
    order = [(FIRST, first), (others, first[:1]), (FIRST, then), (others, (*then, *first[1:]))]
    if options.rehearsal:
        order = [((*FIRST, *others), (64,))]
    for ops, widths in order:
        for width in widths:
            yield from _of_width(ops, (64, width, "float32") if options.rehearsal else (ROWS, width, "bfloat16"))


def _of_width(ops: tuple[str, ...], shape: tuple[int, int, str]) -> Iterator[Case]:
    named = dict(zip(("rows", "width", "dtype"), shape, strict=True))
    for name in ops:
        op, of = all_ops()[name], sample(name, *shape)
        here = [implementation for implementation in op.implementations if runs_here(op, implementation, of)]
        for implementation in (REFERENCE, *here):
            case = {"op": name, "implementation": implementation, **named}
            yield Case(case, functools.partial(measure, name, implementation, shape))
            if name in IN_PLACE:
                yield Case(case | {"donated": True}, functools.partial(donated, name, implementation, shape))
    if "add_rms_norm" in ops and jax.devices()[0].platform == "gpu" and importlib.util.find_spec("torch"):
        name = {"op": "add_rms_norm", "peers": True, **named}
        yield Case(name, functools.partial(peers, shape), limit=PEERS_SECONDS)


def measure(name: str, implementation: str, shape: tuple[int, int, str]) -> dict:
    """By pass: `us` (microseconds), `of_copy`, `vs_reference`, and `host_time` if the time is the host's;
    `error_backward` if only the gradients fail."""
    (times, failed), passes = _timed(name, implementation, shape), {}
    if implementation == REFERENCE:
        _references[name, shape] = times
    elif (name, shape) not in _references:  # another process measured the reference's case
        try:
            _references[name, shape] = _timed(name, REFERENCE, shape)[0]
        except Exception:  # the reference's own case reports the error
            _references[name, shape] = {}
    base = _references[name, shape]
    for what, own in times.items():
        share = bandwidth(name, shape, what, own)
        passes[what] = figures(own, base.get(what)) | {"of_copy": share and share / copy()}
    found = {"implementations": {implementation: passes}, "copy_GB/s": copy()}
    return found | ({"error_backward": in_one_line(failed)} if failed else {})


def _timed(name: str, implementation: str, shape: tuple[int, int, str]) -> tuple[dict[str, Taken], Exception | None]:
    return by_pass(name, implementation, shape, rotate=_rotate(), repeats=REPEATS)


def peers(shape: tuple[int, int, str]) -> dict:
    """Runs `benchmarks.parts.peers`, which imports PyTorch."""
    from benchmarks.parts import peers

    return peers.measure(shape, copy(), ROTATE_BYTES)


def donated(name: str, implementation: str, shape: tuple[int, int, str]) -> dict:
    """Forward time of an op that overwrites a stream that it owns, as it does inside a training step. One program
    visits so many streams, each with its own rows, that none is still in a cache. Many calls are queued, so that the
    device does not wait for the host; barriers keep the calls in order."""
    op, of = all_ops()[name], sample(name, *shape)
    count = max(-(-_rotate() // size(of.args[0])), 1)
    sets = [arrays(jax.random.key(i), of.args) for i in range(count)]
    lanes = len(op.outputs)
    streams, rests = [one[:lanes] for one in sets], [one[lanes:] for one in sets]
    del sets  # streams are donated below

    @functools.partial(jax.jit, donate_argnums=0)
    def program(streams, rests):
        written = []
        for stream, rest in zip(streams, rests, strict=True):
            if written:
                stream, rest, written[-1] = jax.lax.optimization_barrier((stream, rest, written[-1]))
            written.append(run(op, implementation, *stream, *rest, **of.constants))
        return written

    def once():
        nonlocal streams
        streams = program(streams, rests)
        return streams

    found = figures(taken(once, REPEATS).over(count), None)
    return {"implementations": {implementation: {"forward": found}}}


@functools.cache
def copy() -> float:
    """GB/s of a plain copy on this device."""
    return copy_bandwidth(rotate=_rotate(), repeats=REPEATS)


def _rotate() -> int:
    return 0 if jax.devices()[0].platform == "cpu" else ROTATE_BYTES
