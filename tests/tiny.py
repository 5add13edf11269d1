"""Models, batches and training so small that compiling is nearly all they cost."""

import functools

import jax
import numpy as np

from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.runs.config import MeshConfig, OptimizerConfig, RunConfig, TrainConfig
from nagjax.train.distributed.mesh import batch_sharding, make_mesh
from nagjax.train.loss import Batch
from nagjax.train.state import Blueprint
from nagjax.train.step import jit_train_step

BATCH, TOKENS, VOCAB = 8, 8, 32
# For `tolerance`: the widest sums are of 64 numbers (hidden units; tokens of a batch); each of six sublayers is four
# sums behind one another, forward and twice that backward.
FORWARD = {"terms": 64, "chain": 24}
STEP = {"terms": 64, "chain": 72}
# Adam divides a gradient by its own size. With the default 1e-8 an element whose gradient is rounding noise moves as
# far as any other, in a direction that the CPU and the mesh choose. This is far above the noise, and below gradients.
EPSILON = 1e-4


def steps(count: int) -> dict[str, int]:
    """`STEP` after so many updates."""
    return STEP | {"chain": count * STEP["chain"]}


def model_config(**changes) -> ModelConfig:
    return ModelConfig(
        **dict(depth=3, width=16, heads=2, kv_heads=1, context=TOKENS, vocab=VOCAB, dtype="float32") | changes
    )


def run_config(scheme: Scheme, *, optimizer: dict | None = None, train: dict | None = None, **model) -> RunConfig:
    return RunConfig(
        scheme=scheme,
        model=model_config(**model),
        optimizer=OptimizerConfig(**dict(epsilon=EPSILON) | (optimizer or {})),
        train=TrainConfig(**dict(steps=100, batch=BATCH) | (train or {})),
    )


@functools.cache
def blueprint(
    config: RunConfig, data: int = 1, fsdp: int = 1, tensor: int = 1, sequence: int = 1, expert: int = 1
) -> Blueprint:
    devices = jax.devices()[: data * fsdp * tensor * sequence * expert]
    return Blueprint.of(config, make_mesh(MeshConfig(data, fsdp, tensor, sequence, expert), devices))


def packed_batch(seed: int = 0, batch: int = BATCH, tokens: int = TOKENS, vocab: int = VOCAB) -> Batch:
    """Two documents and some padding in every row, cut elsewhere in each."""
    noise = np.random.default_rng(seed)
    segments, positions = np.zeros((2, batch, tokens), np.int32)
    for row in range(batch):
        first, second = 2 + (row + seed) % (tokens // 2), tokens - (row % 2)
        segments[row, :first], positions[row, :first] = 1, np.arange(first)
        segments[row, first:second], positions[row, first:second] = 2, np.arange(second - first)
    text = noise.integers(0, vocab, (2, batch, tokens), dtype=np.int32)
    return Batch(text[0], text[1], segments, positions, (segments > 0).astype(np.float32))


@functools.cache
def trained(scheme: Scheme, mesh: tuple[int, ...] = (1,), steps: int = 3) -> tuple[np.ndarray, int]:
    """Loss and gradient norm [steps, 2] of a few steps on a mesh, and how many programs were compiled for them.

    They begin on one device and are moved: that initial values are the same on any mesh is tested on its own.
    """
    state = start(scheme)
    bp = blueprint(run_config(scheme), *mesh)
    state = jax.device_put(state, bp.shardings())
    step, seen = step_of(scheme, mesh), []
    for seed in range(steps):
        state, metrics = step(state, jax.device_put(packed_batch(seed), batch_sharding(bp.mesh)))
        seen.append((float(metrics.loss), float(metrics.grad_norm)))
    return np.array(seen), step._cache_size()


@functools.cache
def step_of(scheme: Scheme, mesh: tuple[int, ...]):
    return jit_train_step(blueprint(run_config(scheme), *mesh))


@functools.cache
def start(scheme: Scheme):
    """A state away from the initial values, where some gradients are zero but for rounding."""
    state = jax.device_get(created(scheme))
    return state._replace(params=jax.device_get(moved(state.params)))


@functools.cache
def created(scheme: Scheme):
    """Initial values from small programs that all schemes share; the one that creates a run costs as much as a step."""
    return fresh(blueprint(run_config(scheme)))


def fresh(bp: Blueprint):
    """What `bp.create()` makes, up to a rounding, operation by operation."""
    return jax.device_put(bp.init(bp.config.train.seed), bp.shardings())


def moved(params, size: float = 0.05, seed: int = 0):
    """Parameters away from their initial values, so that none is special."""
    noise = np.random.default_rng(seed)
    move = lambda x: np.asarray(x) + np.float32(size) * noise.standard_normal(x.shape).astype(x.dtype)  # noqa: E731
    return jax.device_put(jax.tree.map(move, params))
