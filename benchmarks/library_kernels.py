"""Where a library's kernels would take the place of our own operations: what each moves, as compiled.

`python -m benchmarks.library_kernels` (or `make plans`) compiles the head's loss, the matmuls of dropless experts and
attention, forward and backward, for chips that are not there: ours, JAX's, and tokamax's. What
benchmarks/results/library_kernels.json lacks is compiled; then the table of docs/memory.md is written, and under it
what follows from the figures (`benchmarks.library_choices`).
"""

import contextlib
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import plan_tables as tables
from benchmarks.compiled import ROOT, main
from benchmarks.library_choices import Figures, choices, paragraph
from nagjax.layers import flash, ragged
from nagjax.layers.attend import attend
from nagjax.layers.platform import tracing_for
from nagjax.layers.where import Where, seen_mask
from nagjax.plan.account import account
from nagjax.plan.topology import parse
from nagjax.train.head_loss import Head, Layout, _loss
from pallas_kernels.hlo import parse as parse_program

TOKENS, WIDTH, VOCAB = 16384, 1024, 131072
ROWS, EXPERTS, HIDDEN = 16384, 8, 2816
SEQUENCES, CONTEXT, HEADS, KEY_HEADS, FEATURES = 2, 4096, 16, 4, 128
CASES = [  # operation, chip, implementation
    ("head", "v5e:2x2", "own"),
    ("head", "v5e:2x2", "tokamax chunked_xla"),
    ("head", "v5e:2x2", "tokamax mosaic_tpu"),
    ("head", "h200x1", "own"),
    ("head", "h200x1", "tokamax chunked_xla"),
    ("experts", "v5e:2x2", "jax"),
    ("experts", "v5e:2x2", "tokamax mosaic_tpu"),
    ("experts", "h200x1", "jax"),
    ("experts", "h200x1", "own"),
    ("attention", "v5e:2x2", "splash"),
    ("attention", "v5e:2x2", "xla"),
    ("attention", "v5e:2x2", "tokamax mosaic_tpu"),
    ("attention", "v5e:2x2", "tokamax splash"),
    ("attention", "h200x1", "xla"),
    ("attention", "h200x1", "tokamax mosaic_gpu"),
    ("attention", "h200x1", "tokamax triton"),
]


def head(implementation: str) -> tuple[Callable, list]:
    """The loss of 16,384 tokens, and its gradients with respect to states and table."""

    def own(states, table, targets):
        weights, scale = jnp.ones(targets.shape, jnp.float32), jnp.zeros(targets.shape, jnp.float32)
        return _loss(Head(states, scale, table), targets, weights, Layout(None, 1024, 0.0))[0]

    def theirs(states, table, targets):
        import tokamax

        name = implementation.partition(" ")[2]
        return tokamax.linear_softmax_cross_entropy_loss(states[0], targets[0], table.T, implementation=name)

    shapes = [((1, TOKENS, WIDTH), jnp.bfloat16), ((VOCAB, WIDTH), jnp.bfloat16), ((1, TOKENS), jnp.int32)]
    return jax.value_and_grad(own if implementation == "own" else theirs, (0, 1)), shapes


def experts(implementation: str) -> tuple[Callable, list]:
    """One matmul of 16,384 rows, sorted by expert, with their experts' matrices, and both gradients."""

    def matmul(rows, matrices, sizes):
        if implementation == "own":
            return ragged.ragged_matmul(rows, matrices, sizes)
        if implementation == "jax":
            with mock.patch.object(ragged, "usable", lambda: False):
                return ragged.ragged_matmul(rows, matrices, sizes)
        import tokamax

        name = implementation.partition(" ")[2]
        return tokamax.ragged_dot(rows, matrices, sizes, implementation=name, preferred_element_type=rows.dtype)

    def run(rows, matrices, sizes, cotangent):
        value, back = jax.vjp(lambda *given: matmul(*given, sizes), rows, matrices)
        return value, back(cotangent)

    shapes = [((ROWS, WIDTH), jnp.bfloat16), ((EXPERTS, WIDTH, HIDDEN), jnp.bfloat16), ((EXPERTS,), jnp.int32)]
    return run, [*shapes, ((ROWS, HIDDEN), jnp.bfloat16)]


def attention(implementation: str) -> tuple[Callable, list]:
    """Causal attention of two rows of packed documents, and the gradients of queries, keys and values."""

    def attended(q, k, v, segments, positions):
        where = Where(segments, positions)
        if implementation in ("splash", "xla"):
            return attend(q, k, v, where, where, implementation)
        if implementation in ("tokamax mosaic_gpu", "tokamax triton"):
            older = mock.patch.object(flash, "_hopper_tile", lambda q: None)
            with older if implementation == "tokamax triton" else contextlib.nullcontext():
                return attend(q, k, v, where, where, "tokamax")
        import tokamax

        if implementation == "tokamax mosaic_tpu":  # this kernel does not know documents, but takes any mask
            mask = seen_mask(where, where)
            return tokamax.dot_product_attention(q, k, v, mask=mask, implementation="mosaic_tpu")
        from tokamax._src.ops.experimental.tpu.splash_attention import api, reference, splash_attention_mask

        causal = splash_attention_mask.CausalMask((CONTEXT, CONTEXT))

        def one(q, k, v, segments):
            documents = reference.SegmentIds(segments, segments)
            return api.splash_attention(q, k, v, causal, documents, implementation="mosaic_tpu")

        heads_first = [x.swapaxes(1, 2) for x in (q * FEATURES**-0.5, k, v)]
        return jax.vmap(one)(*heads_first, segments).swapaxes(1, 2)

    def run(q, k, v, segments, positions, cotangent):
        value, back = jax.vjp(lambda *given: attended(*given, segments, positions), q, k, v)
        return value, back(cotangent)

    rows = lambda heads: ((SEQUENCES, CONTEXT, heads, FEATURES), jnp.bfloat16)  # noqa: E731
    numbers = ((SEQUENCES, CONTEXT), jnp.int32)
    return run, [rows(HEADS), rows(KEY_HEADS), rows(KEY_HEADS), numbers, numbers, rows(HEADS)]


def measured(operation: str, chip: str, implementation: str) -> dict:
    """FLOPs of matmuls (None if a kernel does not report them), bytes moved to and from main memory, and temporary
    bytes."""
    from tokamax.config import cross_compile

    topology = parse(chip)
    run, shapes = {"head": head, "experts": experts, "attention": attention}[operation](implementation)
    mesh = Mesh(np.array(topology.devices()[:1]), ("one",), axis_types=(AxisType.Auto,))
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P())) for shape, dtype in shapes]
    with jax.set_mesh(mesh), tracing_for(topology.chip.platform), cross_compile(True):
        platforms = (topology.chip.platform,)
        compiled = jax.jit(run).trace(*given).lower(lowering_platforms=platforms).compile()
    found = account(parse_program(compiled.as_text()), 1)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return {"flops": found.flops or None, "moved": found.moved, "temporary": temporary}


def texts(results: list[dict]) -> dict[str, str]:
    head = ("operation", "chip", "implementation", "matmuls", "main memory", "temporary")
    rows = []
    for one in results:
        flops = "" if one["flops"] is None else f"{one['flops'] / 1e12:.2f} TFLOP"
        figures = (flops, f"{one['moved'] / 1e9:.2f} GB", tables.mebibytes(one["temporary"]))
        rows.append((one["case"][0], f"`{one['case'][1]}`", one["case"][2], *figures))
    figures = {tuple(one["case"]): Figures.of(one) for one in results}
    return {"library kernels": "\n\n".join((shapes(), tables.table(head, rows), choices(figures)))}


def shapes() -> str:
    """A description of the shapes that were compiled."""
    return paragraph(
        f"The head has {TOKENS:,} tokens, {WIDTH:,} features and {VOCAB:,} entries. Experts are one matmul of "
        f"{ROWS:,} rows with {EXPERTS} matrices of {WIDTH:,} x {HIDDEN:,}. Attention is causal within packed "
        f"documents, {SEQUENCES} x {CONTEXT:,} tokens, with {HEADS} heads of queries on {KEY_HEADS} of keys, of "
        f"{FEATURES} features."
    )


PAGES = {ROOT / "docs" / "memory.md": texts}


if __name__ == "__main__":
    main("library_kernels", CASES, measured, PAGES)
