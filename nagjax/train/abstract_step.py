"""The sharded training step, built from shapes alone, so that it can be compiled for devices that this machine lacks.

`python -m pallas_kernels.aot --step nagjax.train.abstract_step:nag_step` compiles it with the TPU and GPU compilers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from nagjax.runs.config import MeshConfig, RunConfig, TrainConfig
from nagjax.train.distributed.mesh import batch_sharding, make_mesh
from nagjax.train.loss import Batch
from nagjax.train.state import Blueprint, TrainState
from nagjax.train.step import jit_train_step


def abstract_batch(blueprint: Blueprint) -> Batch:
    """One training batch as `jax.ShapeDtypeStruct`s: shapes, dtypes and shardings without values."""
    shape = (blueprint.config.train.batch, blueprint.config.model.context)
    sharding = batch_sharding(blueprint.mesh)
    whole: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    real: Any = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return Batch(whole, whole, whole, whole, real)


def training_step(config: RunConfig, devices: Sequence) -> tuple[Callable, tuple[TrainState, Batch], Mesh]:
    """The jitted training step of a run on these devices, its abstract arguments (state, batch), and the run's mesh."""
    blueprint = Blueprint.of(config, make_mesh(config.mesh, devices))
    return jit_train_step(blueprint), (blueprint.abstract(), abstract_batch(blueprint)), blueprint.mesh


def nag_step(devices: Sequence, implementation: str) -> tuple[Callable, tuple, Mesh]:
    """The step of NAG with 8 blocks of width 512, in bfloat16 with rematerialised blocks. The batch is split over all
    devices, so the only communication allowed is the sum of the gradients and a few scalars.

    `implementation` selects how residual updates are computed; "best" leaves the choice to the platform.
    """
    return _step_of(devices, implementation, ModConfig())


def routed_step(devices: Sequence, implementation: str) -> tuple[Callable, tuple, Mesh]:
    """The step of the model of `nag_step` in which half of the tokens skip each sublayer (Mixture-of-Depths)."""
    return _step_of(devices, implementation, ModConfig(rate=(0.5,)))


def _step_of(devices: Sequence, implementation: str, mod: ModConfig):
    attention: Any = "splash" if devices[0].platform == "tpu" else "xla"
    kernels: Any = "auto" if implementation == "best" else implementation
    model = ModelConfig(
        depth=8,
        width=512,
        heads=4,
        context=1024,
        dtype="bfloat16",
        remat="block",
        attention=attention,
        kernels=kernels,
        mod=mod,
    )
    config = RunConfig(find_scheme("nag")(), model, train=TrainConfig(batch=8), mesh=MeshConfig())
    return training_step(config, devices)
