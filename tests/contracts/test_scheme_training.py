"""Every scheme trains: gradients everywhere, one compilation, and the same numbers on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

from nagjax.residual import find_scheme
from nagjax.train.distributed.mesh import AXES, batch_sharding
from nagjax.train.state import Blueprint
from nagjax.train.step import jit_train_step
from tests import meshes, tiny
from tests.contracts.variants import SCHEMES
from tests.streams import one_per_layout, one_per_stream
from tests.tolerance import assert_close


def first_gradient(scheme, params):
    """The gradient up to a factor, as one step of Adam leaves it in its first moment; alpha's ramp is over."""
    bp = tiny.blueprint(tiny.run_config(scheme))
    state = jax.device_get(tiny.created(scheme)._replace(step=jnp.int32(50), params=params))
    batch = jax.device_put(tiny.packed_batch(), batch_sharding(bp.mesh))
    state, metrics = tiny.step_of(scheme, (1,))(jax.device_put(state, bp.shardings()), batch)
    return optax.tree_utils.tree_get(state.optimizer, "mu"), metrics.loss


def test_every_parameter_of_every_layer_has_a_gradient(scheme):
    start = tiny.created(scheme).params
    for params, may_vanish in ((start, True), (tiny.moved(start), False)):
        grads, loss = first_gradient(scheme, params)
        assert np.isfinite(loss)
        for path, grad in jax.tree_util.tree_leaves_with_path(grads):
            name, grad = jax.tree_util.keystr(path), np.asarray(grad)
            assert np.all(np.isfinite(grad)), name
            if not may_vanish:
                by_layer = grad.reshape(grad.shape[0], -1) if "blocks" in name else grad.reshape(1, -1)
                assert np.all(np.any(by_layer != 0, axis=1)), f"{name} has layers without a gradient"


def test_one_compilation_and_finite_steps(scheme):
    seen, compiled = tiny.trained(scheme)
    assert compiled == 1
    assert np.all(np.isfinite(seen)) and np.all(seen > 0)


ROW_KERNELS = ("plain", "lns", "review", "nag")  # these commit through one
OWN = {*one_per_layout(), *ROW_KERNELS, "ngpt"}  # on a mesh; ngpt projects parameters that are split
SPLIT = SCHEMES if meshes.EVERY else [name for name in SCHEMES if name in OWN]
ONCE = {"nag-data", "nag-fsdp", "nag-sequence", "plain-mixed"}  # axes that the other one of the two is split over
PAIRS = [
    pair
    for pair in meshes.pairs(SPLIT, meshes.MESHES, ("plain", "nag"), ("tensor",))
    if meshes.EVERY or pair.id not in ONCE
]


@pytest.mark.parametrize("name, mesh", PAIRS)
def test_eight_devices_give_the_losses_of_one(name, mesh):
    scheme = SCHEMES[name]()
    for got, want in zip(tiny.trained(scheme, mesh)[0].T, tiny.trained(scheme)[0].T, strict=True):
        assert_close(got, want, **tiny.steps(3))


WITHOUT_DEVICES = AbstractMesh((2, 2, 1, 2, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def test_big_matrices_are_split_and_nothing_is_silently_replicated(scheme):
    bp = Blueprint.of(tiny.run_config(scheme), WITHOUT_DEVICES)
    for parameter, sharding in zip(jax.tree.leaves(bp.parameters), jax.tree.leaves(bp.shardings().params), strict=True):
        if parameter.role == "matrix":
            assert sharding.spec.count("fsdp") == sharding.spec.count("tensor") == 1, (parameter, sharding)


@pytest.mark.parametrize("name", sorted({*ROW_KERNELS} | ({*one_per_stream()} - OWN)))
def test_the_sharded_step_lowers_without_devices(name):
    """On an abstract mesh of eight; on one of devices those of every other kind are compiled and run above."""
    bp = Blueprint.of(tiny.run_config(find_scheme(name)()), WITHOUT_DEVICES)
    sharding = batch_sharding(WITHOUT_DEVICES)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tiny.packed_batch())
    lowered = jit_train_step(bp).trace(bp.abstract(), batch).lower(lowering_platforms=("cpu",))
    if name in ROW_KERNELS:
        assert "sdy.manual_computation" in lowered.as_text(), "the kernel must be placed on shards"
