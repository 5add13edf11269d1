"""Derived defaults, refusals, and programs whose size does not depend on depth."""

import jax
import pytest

from nagjax.errors import UserError
from nagjax.layers.config import BlockConfig, OtherBlocks, RopeConfig
from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from nagjax.train.distributed.mesh import batch_sharding
from nagjax.train.step import jit_train_step
from tests import tiny

YARN = BlockConfig(rope=RopeConfig("yarn", 2.0))


@pytest.mark.parametrize(
    "changes, field, names",
    [
        ({"heads": 5}, "heads", "64.*nearest: 4"),
        ({"heads": 0}, "heads", "at least 1"),
        ({"kv_heads": 3}, "kv_heads", "heads 4"),
        ({"kv_heads": -1}, "kv_heads", "at least 1"),
        ({"depth": 0}, "depth", "from 1 to"),
        ({"width": -64}, "width", "from 1 to"),
        ({"context": 0}, "context", "from 1 to"),
        ({"vocab": 0}, "vocab", "from 1 to"),
        ({"hidden": 0}, "hidden", "at least 1"),
        ({"width": 6, "heads": 2}, "heads", "even head width, not 3"),
        ({"width": 33}, "width", "even head width, not 33; try 34"),
        ({"width": 33, "heads": 3}, "width", "even head width, not 11; try 36"),
        ({"width": 1}, "width", "even head width, not 1"),
        ({"heads": 1, "block": BlockConfig(head_width=1)}, "block.head_width", "even head width, not 1"),
        ({"causal": False, "mod": ModConfig(attention_rate=(0.5,))}, "mod.attention_rate", "use 0"),
        ({"rope_base": 1.0, "block": YARN}, "rope_base", "a number above 1"),
        (
            {"block": BlockConfig(others=OtherBlocks((1,), rope_base=0.5, rope=YARN.rope))},
            "block.others.rope_base",
            "1",
        ),
    ],
)
def test_bad_shapes_are_refused_by_name(changes, field, names):
    with pytest.raises(UserError, match=names) as caught:
        ModelConfig(**changes)
    assert caught.value.field == field


def test_sizes_follow_from_depth_and_width():
    small, wide = ModelConfig(depth=8, width=64), ModelConfig(width=1024, mlp="gelu")
    assert (small.heads, small.kv_heads, small.head_width, small.hidden) == (4, 4, 16, 176)
    assert (wide.heads, wide.head_width, wide.hidden, wide.sublayers) == (16, 64, 4096, 48)
    assert ModelConfig(width=6, positions="learned", heads=2).head_width == 3
    assert ModelConfig(width=1, positions="learned").heads == 1
    assert abs(small.hidden - 64 * 8 / 3) < 8 and small.hidden % 8 == 0


@pytest.mark.parametrize("remat", ["none", "block"])
@pytest.mark.parametrize("scheme", ["plain", "nag"])
def test_a_step_of_96_blocks_is_as_large_a_program_as_one_of_12(scheme, remat):
    def lines(depth):
        bp = tiny.blueprint(tiny.run_config(find_scheme(scheme)(), depth=depth, remat=remat))
        sharding = batch_sharding(bp.mesh)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tiny.packed_batch())
        step = jit_train_step(bp).trace(bp.abstract(), batch).lower().as_text()
        return step.count("\n"), str(jax.make_jaxpr(lambda: bp.init(0))()).count("\n")

    shallow, deep = lines(12), lines(96)
    assert min(shallow) > 100
    assert deep[0] <= 1.1 * shallow[0] and deep[1] <= 1.1 * shallow[1], (shallow, deep)
