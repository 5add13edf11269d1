"""Row kernels on a Hopper or Blackwell GPU through Mosaic GPU: persistent programs, whose loads and stores are bulk
copies that run ahead of the arithmetic.

A program goes through its share of the rows with a ring of buffers in shared memory: while it works on the rows of one
step, the copies of the next steps are in flight, without a register held for them. A warpgroup (128 threads) holds a
row, or its part of a row that several warpgroups share; row sums then cross warpgroups through shared memory. Sums over
rows stay in registers, one float32 partial row per program, and are added up outside in an order that depends only on
shapes.

A row is seen as `[D / c, c]`, because a bulk copy takes at most 256 elements of a dimension.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import Arrays, Block, Launch, Results, RowKernel, interpreter, parted, varying_as
from pallas_kernels.launch.gpu import HOPPER_OR_NEWER, refuse_rows, wrong_capability

PLATFORMS = ("cuda",)

THREADS = 128  # threads of a warpgroup
LONGEST_COPY = 256
MULTIPROCESSORS = 132  # of an H200
REGISTERS, THREAD_REGISTERS = 65536, 32  # registers of a multiprocessor, and of a thread besides its row's values
VALUES = 128  # most values of a row per thread, over all arrays: half of the registers that a thread can have
WARPGROUPS = 4
SHARED_BYTES = 228 * 2**10  # shared memory of a multiprocessor
ALIGNED, CUDA_BYTES = 1024, 1024  # bytes to which Mosaic rounds a buffer up, and that CUDA takes for every program
STEP_BYTES = 4096  # narrow rows share a step
STAGES = 2, 4  # steps in a ring, at least and at most
SUMS = 16  # most sums in the arithmetic of one row


def unavailable(platform: str) -> str | None:
    """Why no Mosaic GPU kernel can run on this platform's device, as far as this is known while tracing; None if one
    can."""
    try:
        _mosaic()
    except ImportError as error:
        return f"this JAX ({jax.__version__}) has no Mosaic GPU ({error})"
    return wrong_capability((9, 0), HOPPER_OR_NEWER, before=(12, 0)) if platform == "cuda" else None


def _mosaic() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def refusal(kernel: RowKernel, *rows: jax.Array) -> str | None:
    """Why rows of this width and these dtypes are not supported, or None."""
    width = rows[0].shape[-1]
    if why := refuse_rows(width, *rows):
        return why
    if width % THREADS:
        return f"D = {width}; accepted: multiples of {THREADS}, the threads of a warpgroup"
    groups = warpgroups(kernel, width)
    if groups > WARPGROUPS or width % (groups * THREADS):
        return f"D = {width}: a row does not fit into the registers of {WARPGROUPS} warpgroups"
    if not _fitting(kernel, width, _widest(rows), groups, rows=1, stages=STAGES[0]):
        return f"D = {width}: {STAGES[0]} steps exceed the {SHARED_BYTES >> 10} KiB of shared memory"
    return None


def _widest(rows: Arrays) -> jnp.dtype:
    return max((jnp.dtype(x.dtype) for x in rows), key=lambda dtype: dtype.itemsize)


def warpgroups(kernel: RowKernel, width: int) -> int:
    """The number of warpgroups that share a row, a power of two."""
    return 1 << max(0, math.ceil(math.log2(max(_values(kernel, width), 1) / VALUES)))


def _values(kernel: RowKernel, width: int) -> float:
    return width / THREADS * (kernel.tensors + kernel.vectors + kernel.sums)


class Plan(NamedTuple):
    """How a kernel's rows are distributed: warpgroups per row, the `[a, c]` part of each, rows per step, steps in the
    ring, programs per multiprocessor, and the number of all steps."""

    groups: int
    part: tuple[int, int]
    rows: int
    stages: int
    resident: int
    steps: int

    @property
    def programs(self) -> int:
        return min(MULTIPROCESSORS * self.resident, self.steps)


def shared_bytes(kernel: RowKernel, width: int, dtype: object, groups: int, rows: int, stages: int) -> int:
    """Shared memory of a program: its rings, its vectors, a buffer for the sums of one warpgroup's row, one for sums
    across warpgroups, and its barriers."""
    ring = stages * rows * width * jnp.dtype(dtype).itemsize
    across = 4 * 2 * rows * SUMS * groups if groups > 1 else 0
    buffers = [ring] * kernel.rows + [4 * width] * kernel.vectors + [4 * 4 * THREADS, across]
    barriers = groups * stages + groups + (groups > 1)
    return sum(math.ceil(each / ALIGNED) * ALIGNED for each in buffers) + 8 * barriers


def _fitting(kernel: RowKernel, width: int, dtype: object, groups: int, rows: int, stages: int) -> int:
    """The number of programs for which a multiprocessor has the shared memory."""
    return SHARED_BYTES // (shared_bytes(kernel, width, dtype, groups, rows, stages) + CUDA_BYTES)


def plan(kernel: RowKernel, n: int, width: int, dtype: object) -> Plan:
    groups = warpgroups(kernel, width)
    inner = math.gcd(width // groups, LONGEST_COPY)
    row = width * jnp.dtype(dtype).itemsize
    rows = math.gcd(n, 1 << max(1, STEP_BYTES // row).bit_length() - 1)
    fitting = [_fitting(kernel, width, dtype, groups, rows, stages) for stages in range(STAGES[0], STAGES[1] + 1)]
    registers = _values(kernel, width) / groups + THREAD_REGISTERS
    resident = max(1, min(int(REGISTERS / (THREADS * groups * registers)), fitting[0], 8))
    stages = STAGES[0] + max(0, sum(count >= resident for count in fitting) - 1)
    return Plan(groups, (width // groups // inner, inner), rows, stages, resident, n // rows)


def bytes_moved(kernel: RowKernel, n: int, width: int, dtype: object) -> int:
    """Bytes of one pass: every array once, and one float32 partial row per program and sum."""
    return kernel.bytes_moved(n, width, dtype, plan(kernel, n, width, dtype).programs)


@dataclasses.dataclass(frozen=True)
class Reread:
    """A row in shared memory. Every operation reads it again, instead of holding it in registers."""

    read: Callable[[], jax.Array]


def _operator(name: str) -> Callable:
    function = getattr(operator, name.removeprefix("r"))
    swapped = name.startswith("r")

    def apply(self, other):
        one, two = self.read(), other.read() if isinstance(other, Reread) else other
        return function(two, one) if swapped else function(one, two)

    return apply


for _name in ("add", "sub", "mul", "radd", "rsub", "rmul"):
    setattr(Reread, f"__{_name}__", _operator(_name))


def launched(kernel: RowKernel, n: int, width: int, dtype: object) -> Launch:
    """The launch of a kernel. The rows of all steps in the ring but one are in flight."""
    of = plan(kernel, n, width, dtype)
    step = of.rows * width * jnp.dtype(dtype).itemsize * kernel.rows
    shared = shared_bytes(kernel, width, dtype, of.groups, of.rows, of.stages)
    return Launch(of.programs, of.groups * THREADS, shared, (of.stages - 1) * step)


def rows_call(
    kernel: RowKernel, rows: Arrays, scalars: Arrays = (), vectors: Arrays = (), *, like: Arrays = (), **constants
) -> Results:
    """Runs `kernel` over all rows: its `[N, D]` outputs, `[N]` scalars, and float32 `[D]` sums. In shared memory each
    output overwrites the input at its position, and must have its dtype."""
    plgpu = _mosaic()
    (n, width), dtype = rows[0].shape, rows[0].dtype
    plans = plan(kernel, n, width, _widest(rows))
    groups, (a, c), size, stages, _, steps = plans
    programs, like = plans.programs, like or rows[:1] * kernel.outputs
    layout = plgpu.Layout.WG_STRIDED((a, c), vec_size=math.gcd(8, a * c // THREADS))
    read = [scalars[i] for i in kernel.reads]
    counts = len(rows), len(read), len(vectors), len(like), kernel.computes, kernel.sums, len(rows), len(vectors)

    def program(*refs):
        row_refs, read_refs, vector_refs, out_refs, number_refs, sum_refs, rings, held, others = parted(refs, *counts)
        loaded, whole, *shared = others
        start = lax.axis_index("program")
        group = lax.axis_index("group") if groups > 1 else jnp.int32(0)
        mine = pl.ds(group * a, a)
        count = (steps - start + programs - 1) // programs

        def load(ref):
            return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

        def place(step):
            """The step's slot in the rings, and its rows."""
            return group * stages + lax.rem(step, jnp.int32(stages)), pl.ds((start + step * programs) * size, size)

        def fetch(step):
            slot, those = place(step)
            for ref, ring in zip(row_refs, rings, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[those, mine], ring.at[slot], loaded.at[slot])

        def total(x, at):
            """The sum of a row. Groups sum one after the other: Mosaic has a single scratch buffer for a group's part
            of a sum, which all groups share. Two successive steps use different places in shared memory, since no group
            can be more than one step ahead of another."""
            x = x.read() if isinstance(x, Reread) else x
            if groups == 1:
                return jnp.sum(x)
            parts, met = shared
            for g in range(groups):
                pl.when(group == g)(lambda g=g: parts.__setitem__(at * groups + g, jnp.sum(x)))
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)
            return sum(parts[at * groups + g] for g in range(groups))

        def one_step(step, partials):
            slot, those = place(step)
            # Once the previous step is stored, its slot is free for the step that is `stages - 1` ahead of this one.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            ahead = step + (stages - 1)
            pl.when((step > 0) & (ahead < count))(lambda: fetch(ahead))
            plgpu.barrier_wait(loaded.at[slot])
            turn, sums = lax.rem(step, jnp.int32(2)) * (size * SUMS), itertools.count()
            for j in range(size):
                row = (start + step * programs) * size + j
                wide = [Reread(lambda ring=ring, j=j: load(ring.at[slot, j])) for ring in rings]
                weights = [Reread(lambda ref=ref: load(ref.at[mine])) for ref in held]
                block = Block(width, dtype, reduce=lambda x: total(x, turn + next(sums)))
                narrow = [ref[row] for ref in read_refs]
                outputs, computed, summands = kernel.body(block, wide, narrow, weights, **constants)
                for ring, value in zip(rings, outputs, strict=False):
                    ring[slot, j] = value.astype(ring.dtype)
                for ref, value in zip(number_refs, computed, strict=True):
                    pl.when(group == 0)(functools.partial(ref.__setitem__, row, value))
                partials = tuple(p + s for p, s in zip(partials, summands, strict=True))
            plgpu.commit_smem()
            for ring, ref in zip(rings, out_refs, strict=False):
                plgpu.copy_smem_to_gmem(ring.at[slot], ref.at[those, mine])
            return partials

        for ref, vector in zip(vector_refs, held, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[mine], vector.at[mine], whole.at[group])
        for step in range(stages):
            pl.when(step < count)(lambda step=step: fetch(jnp.int32(step)))
        if vectors:
            plgpu.barrier_wait(whole.at[group])
        zeros = (plgpu.layout_cast(jnp.zeros((a, c), jnp.float32), layout),) * kernel.sums
        partials = lax.fori_loop(jnp.int32(0), count, one_step, zeros)
        for ref, partial in zip(sum_refs, partials, strict=True):
            ref[start, mine] = partial
        plgpu.wait_smem_to_gmem(0)

    def split(x):
        return x.reshape(*x.shape[:-1], groups * a, c)

    scratch = [plgpu.SMEM((groups * stages, size, a, c), x.dtype) for x in rows]
    scratch += [plgpu.SMEM((groups * a, c), jnp.float32)] * len(vectors)
    scratch += [plgpu.Barrier(num_arrivals=len(rows), num_barriers=groups * stages)]
    scratch += [plgpu.Barrier(num_arrivals=max(1, len(vectors)), num_barriers=groups)]
    threads = {}
    if groups > 1:
        scratch += [plgpu.SMEM((2 * size * SUMS * groups,), jnp.float32), plgpu.Barrier(num_arrivals=groups)]
        threads = dict(num_threads=groups, thread_name="group")
    out = [jax.ShapeDtypeStruct((n, groups * a, c), x.dtype) for x in like]
    out += [jax.ShapeDtypeStruct((n,), jnp.float32)] * kernel.computes
    out += [jax.ShapeDtypeStruct((programs, groups * a, c), jnp.float32)] * kernel.sums
    results = plgpu.kernel(
        program,
        out_type=varying_as(rows[0], out),
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        interpret=interpreter(),
        kernel_name=kernel.name,
        **threads,
    )(*map(split, rows), *read, *(split(v.astype(jnp.float32)) for v in vectors))
    wide, computed, partials = parted(results, kernel.outputs, kernel.computes)
    sums = tuple(jnp.sum(p, axis=0).reshape(width) for p in partials)
    return tuple(x.reshape(n, width) for x in wide), tuple(kernel.lane(scalars, computed)), sums
