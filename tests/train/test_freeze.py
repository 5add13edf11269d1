"""What is frozen keeps its value, has no optimizer state, and is not counted as trained."""

import jax
import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.layers.config import MoEConfig
from nagjax.mod.costs import costs
from nagjax.residual import find_scheme
from nagjax.runs.trained import count_trained, dotted
from nagjax.train.announce import least_bytes
from nagjax.train.distributed.mesh import batch_sharding
from nagjax.train.facts import state_bytes
from nagjax.train.step import jit_train_step
from tests import tiny

FROZEN = ("embedding", "blocks.mlp.branch.*")


def frozen(*patterns, **model):
    return tiny.run_config(find_scheme("nag")(), optimizer={"freeze": patterns}, **model)


def is_frozen(name: str) -> bool:
    return name.startswith(("embedding.", "blocks.mlp.branch."))


def test_frozen_parameters_keep_their_values():
    """Balancing biases among them, which no gradient moves; those that are not frozen move: test_moe_training.py."""
    bp = tiny.blueprint(frozen(*FROZEN, moe=MoEConfig(experts=4, active=2, bias_rate=0.1)), 1, 2)
    state = tiny.fresh(bp)
    before = jax.device_get(tiny.moved(jax.device_get(state.params)))
    assert "balance" in before["blocks"]["mlp"]["branch"]
    state = jax.device_put(state._replace(params=before), bp.shardings())
    step = jit_train_step(bp)
    for seed in range(2):
        state, _ = step(state, jax.device_put(tiny.packed_batch(seed), batch_sharding(bp.mesh)))
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(state.params))
    for (path, after), first in zip(leaves, jax.tree.leaves(before), strict=True):
        assert np.array_equal(after, first) == is_frozen(dotted(path)), dotted(path)
    known = [".".join(str(key) for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(state.optimizer)]
    assert any("'query'" in name for name in known)
    assert not any("'embedding'" in name or ("'mlp'" in name and "'branch'" in name) for name in known)


def test_what_is_frozen_has_no_moments_and_no_gradients():
    whole, part = tiny.blueprint(frozen()), tiny.blueprint(frozen(*FROZEN))
    count, trained = (count_trained(bp.parameters) for bp in (whole, part))
    assert 0 < trained < count == sum(p.size for p in jax.tree.leaves(whole.parameters))
    assert state_bytes(part)["parameters"] == state_bytes(whole)["parameters"]
    assert state_bytes(whole)["optimizer"] - state_bytes(part)["optimizer"] == 2 * 4 * (count - trained)
    assert least_bytes(whole) - least_bytes(part) == 3 * 4 * (count - trained)
    each = [costs(bp.config.model, bp.parameters, "nag", "threshold") for bp in (whole, part)]
    mlp = sum(p.size for p in jax.tree.leaves(whole.parameters["blocks"]["mlp"]["branch"]))
    assert each[0].train - each[1].train == 2 * mlp  # the weights' third of forward and backward
    assert each[0].forward == each[1].forward


def test_a_tied_head_cannot_be_frozen_alone():
    config = frozen("head", tied=True)
    with pytest.raises(UserError, match="freeze = 'head'.*tied to the embedding"):
        tiny.blueprint(config)


@pytest.mark.parametrize(
    "patterns, message",
    [
        (("blocks.mlp.brunch.*",), r"freeze = .*brunch.*names no parameter.*embedding\.tokens"),
        (("adapter",), "freeze = 'adapter': no parameter has this role: there are embedding, gate, head, matrix"),
        (("*",), "leaves nothing to train"),
        (("matrix", "embedding", "head", "gate"), "leaves nothing to train"),
    ],
)
def test_patterns(patterns, message):
    config = frozen(*patterns)
    with pytest.raises(UserError, match=message):
        tiny.blueprint(config)
