"""The programs that are compiled, and the checks of their results."""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Like
from jax.extend import core
from jax.sharding import use_abstract_mesh

from pallas_kernels.aot import traffic
from pallas_kernels.aot.targets import Target, abstract_mesh
from pallas_kernels.ops import all_ops
from pallas_kernels.shapes import sample

# (rows, width, dtype). The first two fill the table; the others test a width that is not a multiple of 128
# lanes, and fewer rows than a block.
TABLE = ((16384, 2048, "bfloat16"), (16384, 8192, "bfloat16"))
EDGES = ((1024, 1000, "float32"), (7, 5461, "bfloat16"))
# Further widths at which the GPU compiler's facts are compared, and the chip: the one with both backends of JAX.
FACTS, FACTS_OF = tuple((16384, width, "bfloat16") for width in (640, 1024, 4096)), "h200"
COMPARED = ("pallas_triton", "mosaic_gpu")

# A program may move this much more than its kernel, for the second stage of the sums over rows.
SLACK = 1.02
# Operands of one float per row may be handled outside the kernel, or padded to a block.
SCALARS = 0.001

# The kernel call that each implementation contains.
KERNEL_CALL = {"mosaic_tpu": "tpu_custom_call", "pallas_triton": "gpu.triton", "triton": "triton_kernel_call"}
KERNEL_CALL |= {"mosaic_gpu": "mosaic_gpu", "composed": KERNEL_CALL["pallas_triton"]}
KERNELS = set(KERNEL_CALL.values())
# Several passes by design, so no byte count is checked.
COMPOSED = {("nag_update_modulated", "mosaic_gpu"), ("nag_update_modulated", "composed")}
# Ops on rows by index, which XLA moves without a kernel.
WITHOUT_KERNEL = {("take_rows", "mosaic_gpu"), ("put_rows", "mosaic_gpu")}

# Implementations in which XLA reads the direction again outside the kernel, for the weight gradient.
PRODUCT_BESIDE = ("nag_update_modulated", ("pallas_triton", "triton"), "backward")


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to compile.

    Args:
      op: name of an op; for `verb = "step"` also where to find another step, as `module:function`.
      implementation: of the op. For "reference" there is a third verb, `saving`: the forward pass that keeps
        what autodiff needs, where `forward` keeps nothing.
      verb: forward, backward, saving or step.
    """

    op: str
    implementation: str
    verb: str
    rows: int = 0
    width: int = 0
    dtype: str = ""

    @property
    def label(self) -> str:
        shape = f" {self.rows}x{self.width} {self.dtype}" if self.rows else ""
        return f"{self.op} {self.implementation} {self.verb}{shape}"


def cases(target: Target) -> list[Case]:
    """All cases of one target: each op in each implementation of the platform, and a training step for each
    implementation."""
    listed = []
    with use_abstract_mesh(abstract_mesh(target)):
        for name, op in all_ops().items():
            measured = sample(name, *TABLE[0]).sizes is not None and target.platform != "rocm"
            if measured:
                for verb in ("forward", "saving", "backward"):
                    listed += [Case(name, "reference", verb, *shape) for shape in TABLE]
                listed.append(Case(name, "best", "step"))
            for implementation, way in op.implementations.items():
                everywhere = () if target.platform == "rocm" else (target.platform,)  # no XLA for AMD
                if target.platform not in (way.platforms or everywhere) or way.unavailable(target.platform):
                    continue
                shapes = TABLE + EDGES if way.platforms else TABLE
                if target.name == FACTS_OF and measured and implementation in COMPARED:
                    shapes += FACTS
                for shape in shapes:
                    of = sample(name, *shape)
                    if way.refusal(*of.args, **of.constants) is None:
                        listed += [Case(name, implementation, verb, *shape) for verb in ("forward", "backward")]
                if measured and way.platforms and implementation != target.best:
                    listed.append(Case(name, implementation, "step"))
    return listed


def quickest(listed: Iterable[Case]) -> list[Case]:
    """A third of the cases: one shape of the table and one edge, and the steps in which the platform chooses the
    implementation."""
    shapes = (TABLE[0], EDGES[0])
    return [c for c in listed if (c.rows, c.width, c.dtype) in shapes or (c.verb, c.implementation) == ("step", "best")]


def program(case: Case) -> tuple[Callable, tuple[Like, ...]]:
    """The function of a case and its abstract arguments. No output is an input or occurs twice: a compiler would copy
    it, and the copy would count as traffic of the op."""
    op = all_ops()[case.op]
    inputs, constants, _ = sample(case.op, case.rows, case.width, case.dtype)
    way = op.implementations.get(case.implementation)
    run = way.forward if way else op.reference

    def forward(*args):
        return run(*args, **constants)

    def saving(*args):
        return jax.vjp(forward, *args)

    if case.implementation == "reference":
        outputs, pull = jax.eval_shape(saving, *inputs)
        if case.verb == "backward":
            return _lean(lambda pull, outputs: pull(outputs), pull, outputs)
        return _lean(saving if case.verb == "saving" else forward, *inputs)
    if case.verb == "forward":
        return _lean(forward, *inputs)
    outputs, extra = jax.eval_shape(forward, *inputs)
    kept = tuple(inputs[i] for i in op.keep_inputs) + tuple(outputs[i] for i in op.keep_outputs)
    return _lean(lambda r, c: way.backward(r, c, **constants), kept + tuple(extra), outputs)


def _lean(fn: Callable, *args) -> tuple[Callable, tuple[Like, ...]]:
    closed = jax.make_jaxpr(fn)(*args)
    given = set(closed.jaxpr.invars)
    outputs = (v for v in closed.jaxpr.outvars if not isinstance(v, core.Literal))
    wanted = [v for v in dict.fromkeys(outputs) if v not in given]
    lean = core.ClosedJaxpr(closed.jaxpr.replace(outvars=wanted), closed.consts)
    return core.jaxpr_as_fun(lean), tuple(jax.tree.leaves(args))


def estimated_bytes(fn: Callable, args: Iterable[Like]) -> int | None:
    """The sum of the `CostEstimate` bytes of all Pallas kernels in a function; None if there are none."""
    calls = [e for e in jax.make_jaxpr(fn)(*args).jaxpr.eqns if e.primitive.name == "pallas_call"]
    return sum(e.params["cost_estimate"].bytes_accessed for e in calls) if calls else None


def expected_bytes(case: Case) -> int:
    """The implementation's own `bytes_moved`."""
    sizes = sample(case.op, case.rows, case.width, case.dtype).sizes
    moved = all_ops()[case.op].implementations[case.implementation].bytes_moved
    return moved(case.rows, case.width, case.dtype, *sizes, backward=case.verb == "backward")


def _one_pass(case: Case) -> bool:
    """Whether the case is one kernel whose bytes are known exactly: rows in whole blocks, each visited once."""
    shape = case.rows, case.width, case.dtype
    if shape not in TABLE or (case.op, case.implementation) in COMPOSED:
        return False
    return sample(case.op, *shape).sizes is not None


def _beside(case: Case) -> int:
    """Bytes that XLA moves outside the kernel: the direction, and half as much for partial products."""
    op, implementations, verb = PRODUCT_BESIDE
    if (case.op, case.verb) != (op, verb) or case.implementation not in implementations:
        return 0
    return case.rows * case.width * jnp.dtype(case.dtype).itemsize * 3 // 2


def measure(case: Case, text: str, estimate: int | None, best: str | None = None) -> dict:
    """Figures of a compiled program, and under "problems" every check that failed. `best`: the implementation that the
    platform must choose for a case whose implementation is "best"."""
    found = {"custom_calls": traffic.custom_calls(text), "collectives": traffic.collectives(text)}
    call = KERNEL_CALL.get(best if case.implementation == "best" else case.implementation)
    if (case.op, case.implementation) in WITHOUT_KERNEL:
        call = None
    if case.verb == "step":
        extra = sorted(set(found["collectives"]) - {"all-reduce"})
        problems = [f"unexpected collectives: {extra}"] if extra else []
        if "all-reduce" not in found["collectives"]:
            problems.append("no gradient is summed over the devices")
    else:
        if sample(case.op, case.rows, case.width, case.dtype).sizes is not None:
            found["bytes"] = traffic.traffic(text)
        problems = [f"collectives: {found['collectives']}"] if found["collectives"] else []
    kernels = sum(count for name, count in found["custom_calls"].items() if call and call in name)
    if call and not kernels:
        problems.append(f"no {call} in the program")
    if best == "xla" and (there := [name for name in found["custom_calls"] if any(c in name for c in KERNELS)]):
        problems.append(f"{there} in a program for a GPU that is left to XLA")
    if call and _one_pass(case):
        expected = found["expected"] = expected_bytes(case)
        kernel = found["kernel"] = traffic.kernel_traffic(text, call)
        if estimate not in (None, expected):
            problems.append(f"CostEstimate says {estimate} bytes, bytes_moved {expected}")
        if abs(kernel - expected) > SCALARS * expected:
            problems.append(f"the kernel reads and writes {kernel} bytes, bytes_moved {expected}")
        if found["bytes"] > SLACK * (expected + _beside(case)):
            problems.append(f"the program moves {found['bytes']} bytes, its kernel {expected}: a second pass")
    return found | {"problems": problems}
