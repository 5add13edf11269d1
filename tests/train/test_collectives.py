"""What the compiled step communicates, counted by kind; and what the compiler says of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nagjax.mod.config import ModConfig
from nagjax.plan.account import account
from nagjax.plan.compile import REMATERIALISED
from nagjax.residual import find_scheme
from nagjax.train.abstract_step import abstract_batch
from nagjax.train.step import jit_train_step
from pallas_kernels.hlo import parse
from tests import tiny

# Executions in one step of two blocks by XLA for CPUs, which knows no reduce-scatter: what a TPU scatters is here
# all-reduced and cut (tests/aot counts it there). Of a block, fsdp gathers 9 parameters forward and the same 9
# backward, for none is kept stacked over depth; a split sequence its keys and values.
CASES = {
    "data": ((8,), ModConfig(), {"all-reduce": 3}),
    "fsdp": ((1, 8), ModConfig(), {"all-gather": 2 * 18 + 2, "all-reduce": 8, "all-to-all": 2}),
    "sequence": ((2, 2, 1, 2), ModConfig(), {"all-gather": 2 * (18 + 2) + 2, "all-reduce": 17}),
    "tensor": (
        (2, 2, 2),
        ModConfig(),
        {"all-gather": 50, "all-reduce": 38, "all-to-all": 6, "collective-permute": 14},
    ),
    "routed": (
        (2, 2, 2),
        ModConfig(rate=(0.5,)),
        {"all-gather": 50, "all-reduce": 39, "all-to-all": 8, "collective-permute": 26},
    ),
}


@pytest.fixture(autouse=True)
def _compiled_here():
    """A program from a cache has no log. Whether there is one jax asks once, unless it is reset."""
    for enabled in (False, True):
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
        if not enabled:
            yield


@pytest.mark.parametrize("name", CASES)
def test_collectives_of_a_step(name, capfd):
    mesh, mod, expected = CASES[name]
    blueprint = tiny.blueprint(tiny.run_config(find_scheme("nag")(), depth=2, mod=mod), *mesh)
    compiled = jit_train_step(blueprint).lower(blueprint.abstract(), abstract_batch(blueprint)).compile()
    assert REMATERIALISED not in capfd.readouterr().err
    found = account(parse(compiled.as_text()), blueprint.mesh.size).collectives
    assert {kind: one.count for kind, one in found.items()} == expected


def test_the_log_is_seen(capfd):
    """A change of layout that the compiler can only make by way of the whole array."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    pin = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    move = jax.jit(lambda x: pin(jnp.sin(pin(2 * x, "a", None)), None, "b"))
    move.lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile()
    assert REMATERIALISED in capfd.readouterr().err
