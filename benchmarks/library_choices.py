"""The conclusions from the figures of benchmarks.library_kernels: which implementation nagjax uses and why, in
sentences with the numbers of the results."""

import dataclasses
import textwrap

from benchmarks.plan_tables import mebibytes
from nagjax.plan.topology import parse

LINE = 120


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of one implementation: FLOPs of its matmuls (None if a kernel does not report them), bytes moved,
    temporary bytes besides operands and results, and the least milliseconds that matmuls and bytes take on its chip."""

    flops: float | None
    moved: float
    temporary: int
    matmuls: float
    memory: float

    @classmethod
    def of(cls, result: dict) -> "Figures":
        chip, flops, moved = parse(result["case"][1]).chip, result["flops"], result["moved"]
        return cls(flops, moved, result["temporary"], 1e3 * (flops or 0) / chip.flops, 1e3 * moved / chip.bandwidth)

    @property
    def least(self) -> float:
        """The least milliseconds that the implementation takes."""
        return max(self.matmuls, self.memory)


def choices(found: dict[tuple[str, str, str], Figures]) -> str:
    """One item for each operation and platform."""
    tpu, gpu = "v5e:2x2", "h200x1"
    own, theirs = (found["head", tpu, name] for name in ("own", "tokamax chunked_xla"))
    here, there = (found["head", gpu, name] for name in ("own", "tokamax chunked_xla"))
    more = theirs.flops - own.flops
    jax, mosaic = (found["experts", tpu, name] for name in ("jax", "tokamax mosaic_tpu"))
    dense, grouped = (found["experts", gpu, name] for name in ("jax", "own"))
    names = ("splash", "xla", "tokamax mosaic_tpu", "tokamax splash")
    splash, scores, masked, packed = (found["attention", tpu, name] for name in names)
    xla, hopper, triton = (found["attention", gpu, name] for name in ("xla", "tokamax mosaic_gpu", "tokamax triton"))
    items = {
        "Head: nagjax's chunks.": f"tokamax computes the logits a second time for the gradient, four matmuls where "
        f"the chunks need three, because the gradient of each chunk is made while its logits are there. That is "
        f"{more / 1e12:.1f} TFLOP more, {theirs.matmuls - own.matmuls:.0f} ms of a v5e, for which the bytes saved do "
        f"not pay, as the matmuls are the bound there: at least {own.least:.1f} ms for the chunks and "
        f"{theirs.least:.1f} ms for tokamax's; on an H200 {here.least:.1f} ms and {there.least:.1f} ms.",
        "Experts on a TPU: JAX's.": f"{jax.flops / 1e12:.2f} TFLOP take a v5e {jax.matmuls:.1f} ms, and "
        f"{jax.moved / 1e9:.2f} GB {jax.memory:.1f} ms, so the matmuls are the bound, with tokamax's "
        f"{mosaic.moved / 1e9:.2f} GB as well, and JAX's needs no package. Its {mebibytes(jax.temporary)} of temporary "
        f"memory, against {mebibytes(mosaic.temporary)}, is a masked gradient of the result and a turned copy of the "
        f"matrices, of one matmul at a time. With 16 times as many rows and matrices it would be "
        f"{16 * jax.temporary / 2**30:.1f} GiB, which may decide what fits.",
        "Experts on a GPU: tokamax's Triton kernels where it is installed.": f"JAX's ragged matmul has an instruction "
        f"on a TPU. For NVIDIA's GPUs XLA expands it to matmuls with all matrices, {dense.flops / grouped.flops:.0f} "
        f"times the work here, and as many times as there are experts: {dense.matmuls:.1f} ms of an H200 instead of "
        f"{grouped.matmuls:.1f} ms.",
        "Attention on a TPU: JAX's splash kernels.": f"XLA's writes all scores: {scores.moved / 1e9:.1f} GB, "
        f"{scores.memory:.1f} ms of a v5e, where splash attention moves {splash.moved / 1e9:.2f} GB and the "
        f"matmuls are the bound, {splash.matmuls:.1f} ms. tokamax's public kernels take documents only as a mask of "
        f"all queries and keys, which is in memory ({mebibytes(masked.temporary)} against "
        f"{mebibytes(splash.temporary)}). Its splash kernels take documents and give all gradients in "
        f"one kernel, seven matmuls where JAX's need nine: "
        f"{packed.matmuls:.1f} ms of a v5e, or less, because they leave out blocks between documents, with "
        f"{mebibytes(packed.temporary)}. tokamax calls them experimental, and no device has compared the two.",
        "Attention on a GPU: cuDNN's, or, where its mask is large, tokamax's.": f"XLA's moves "
        f"{xla.moved / 1e9:.1f} GB, {xla.memory:.1f} ms of an H200; tokamax's {hopper.moved / 1e9:.2f} GB on "
        f"Hopper, and {triton.moved / 1e9:.2f} GB by its Triton kernels, whose backward pass has a mask "
        f"({mebibytes(triton.temporary)} of temporary memory against {mebibytes(hopper.temporary)}), so the matmuls "
        f"are the bound, {hopper.matmuls:.1f} ms. cuDNN's cannot be compiled without a GPU.",
    }
    return "\n".join(paragraph(f"- **{name}** {text}", indent="  ") for name, text in items.items())


def paragraph(text: str, indent: str = "") -> str:
    return textwrap.fill(text, LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
