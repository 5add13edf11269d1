"""Part `steps`: whole training steps of each scheme compared with plain pre-norm, with their memory and MFU.

MFU = (training FLOPs per token, by `nagjax.mod.costs`) x (tokens per step) / (seconds per step) / (peak FLOP/s). The
peak is that of a bfloat16 matrix product measured in the same run; MFU by the data sheet's peak is given beside it.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.parts.attention import working
from benchmarks.parts.rows import Case, Options
from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.model.presets import find_preset
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig, TrainConfig
from nagjax.runs.facts import model_costs, peak_flops
from nagjax.train.abstract_step import abstract_batch
from nagjax.train.distributed.mesh import make_mesh
from nagjax.train.loss import Batch
from nagjax.train.state import Blueprint
from nagjax.train.step import jit_train_step
from pallas_kernels import timing

SCHEMES = ("plain", "nag", "lns", "review")
VOCAB = 32768
ROUNDS, STEPS = 5, 3
FIRST, THEN = SCHEMES[:2], SCHEMES[2:]
SETTINGS = (  # size, rematerialisation, kernels, schemes; five minutes suffice for about eight
    *(("350M", "block", "auto", SCHEMES), ("350M", "block", "xla", FIRST), ("1B", "block", "auto", FIRST)),
    *(("350M", "block", "xla", THEN), ("1B", "block", "auto", THEN), ("350M", "dots", "auto", SCHEMES)),
    *(("1B", "dots", "auto", SCHEMES), ("1B", "block", "xla", SCHEMES), ("350M", "none", "auto", SCHEMES)),
    *(("350M", "dots", "xla", SCHEMES), ("350M", "none", "xla", SCHEMES), ("1B", "dots", "xla", SCHEMES)),
    *(("1B", "none", "auto", SCHEMES), ("1B", "none", "xla", SCHEMES)),
)
# At 1B, parameters, moments and gradients take 16 GB; without rematerialisation, activations take 60 more
# (docs/plan.md).
LEAST_BYTES = {("1B", "block"): 20 * 2**30, ("1B", "dots"): 20 * 2**30, ("1B", "none"): 90 * 2**30}


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the batch of one step."""

    name: str
    depth: int
    width: int
    context: int
    batch: int
    vocab: int = VOCAB


def sizes(rehearsal: bool) -> tuple[Size, ...]:
    """The sizes of the papers' comparisons, or one that a laptop compiles in seconds."""
    if rehearsal:
        return (Size("rehearsal", 2, 16, 16, 2, 64),)
    shape = lambda name, batch: Size(name, **dataclasses.asdict(find_preset(name)), batch=batch)  # noqa: E731
    return shape("350M", 8), shape("1B", 4)


def cases(options: Options) -> Iterator[Case]:
    """The most important figures come first. Sizes that cannot fit into this device's memory are left out before they
    are compiled."""
    known = {size.name: size for size in sizes(options.rehearsal)}
    rehearsed = [("rehearsal", "block", "auto", SCHEMES)]
    for name, remat, kernels, schemes in rehearsed if options.rehearsal else SETTINGS:
        if too_large(name, remat):
            continue
        plain = functools.partial(measure, known[name], "plain", kernels=kernels, remat=remat)
        for scheme in schemes:
            case = {"size": name, "scheme": scheme, "kernels": kernels, "remat": remat}
            own = functools.partial(measure, known[name], scheme, kernels=kernels, remat=remat)
            yield Case(case, functools.partial(compared, own, plain))


def too_large(name: str, remat: str) -> bool:
    """Whether a size cannot fit into this device's memory."""
    return device_bytes() < LEAST_BYTES.get((name, remat), 0)


def device_bytes() -> float:
    """Bytes of the device's memory that programs may use; infinite if the device does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)


def routed_cases(options: Options) -> Iterator[Case]:
    """Part `mod`: Mixture-of-Depths at a quarter and at half of the tokens, compared with the dense step."""
    for size in sizes(options.rehearsal):
        if too_large(size.name, "block"):
            continue
        for scheme in ("nag",) if options.rehearsal else ("nag", "plain"):
            block = functools.partial(measure, size, scheme, remat="block")
            dense, half, quarter = (functools.partial(block, mod=ModConfig(rate=(rate,))) for rate in (0.0, 0.5, 0.25))
            for rate, own in ((0.0, dense), (0.5, half), (0.25, quarter)):
                name = {"size": size.name, "scheme": scheme, "rate": rate}
                yield Case(name, functools.partial(compared, own, dense))


def blueprint_of(size: Size, scheme: str, **model) -> Blueprint:
    """A blueprint on one device, without reading anything from disk, and with an attention implementation that works
    here."""
    shape = {name: getattr(size, name) for name in ("depth", "width", "context", "vocab")}
    config = RunConfig(
        find_scheme(scheme)(),
        working(ModelConfig(**shape, **model), size.batch),
        train=TrainConfig(steps=10_000, batch=size.batch),
    )
    return Blueprint.of(config, make_mesh(config.mesh, jax.devices()[:1]))


def compared(own: Callable[[], dict], base: Callable[[], dict]) -> dict:
    """The figures of a step, with `vs_base`: its time and its FLOPs divided by those of another step. If this process
    has not measured the other step yet, it does so."""
    found, other = own(), _figures(base)
    ratios = other and {of: found[of] / other[of] for of in ("milliseconds", "flops_per_step")}
    return found | {"vs_base": ratios}


@functools.cache
def _figures(step: Callable[[], dict]) -> dict | None:
    """The figures of a step; None if it fails, in which case its own case reports the error."""
    try:
        return step()
    except Exception:
        return None


@functools.cache
def measure(size: Size, scheme: str, **model) -> dict:
    """Milliseconds per step (median and least of the rounds), tokens/s, MFU, and bytes of device memory. Compilation is
    fast if another part has compiled the same step."""
    blueprint, peak = blueprint_of(size, scheme, **model), matmul_flops()
    compiled = jit_train_step(blueprint).lower(blueprint.abstract(), abstract_batch(blueprint)).compile()
    state, batch = blueprint.create(), random_batch(size)
    for _ in range(2):
        state, metrics = compiled(state, batch)
    jax.block_until_ready(metrics)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(STEPS):
            state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
        times.append((time.perf_counter() - began) / STEPS)
    if not np.isfinite(float(metrics.loss)):
        raise FloatingPointError(f"loss = {float(metrics.loss)}")
    seconds, tokens = statistics.median(times), size.batch * size.context
    flops = model_costs(blueprint).train * tokens
    sheet = peak_flops(jax.devices()[0].device_kind)
    memory = compiled.memory_analysis()
    return {
        "attention": blueprint.config.model.attention,
        "milliseconds": 1e3 * seconds,
        "least_milliseconds": 1e3 * min(times),
        "tokens_per_second": tokens / seconds,
        "mfu": flops / seconds / peak,
        "mfu_of_data_sheet": flops / seconds / sheet if sheet else None,
        "flops_per_step": flops,
        "matmul_flops": peak,
        "temporary_bytes": memory.temp_size_in_bytes if memory else None,
        "argument_bytes": memory.argument_size_in_bytes if memory else None,
        "loss": float(metrics.loss),
    }


def random_batch(size: Size) -> Batch:
    """A batch with one document per row, of tokens drawn at random."""
    noise = np.random.default_rng(0)
    tokens = noise.integers(0, size.vocab, (size.batch, size.context + 1), dtype=np.int32)
    shape = (size.batch, size.context)
    positions = np.broadcast_to(np.arange(size.context, dtype=np.int32), shape)
    ones = np.ones(shape, np.int32)
    return jax.device_put(Batch(tokens[:, :-1], tokens[:, 1:], ones, positions, np.ones(shape, np.float32)))


@functools.cache
def matmul_flops() -> float:
    """FLOP/s of a bfloat16 matrix product of random numbers on this device; the median of several."""
    n = 256 if jax.devices()[0].platform == "cpu" else 8192
    a, b = jax.random.normal(jax.random.key(0), (2, n, n), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    return 2 * n**3 / timing.seconds(lambda: product(a, b), ROUNDS)
