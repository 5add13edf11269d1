"""Parameters carry Flax's own sharding metadata: logical axis names, or mesh axes if there are rules."""

import flax.linen
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nagjax.model.transformer import Transformer
from nagjax.residual import find_scheme
from nagjax.train.distributed.mesh import SHARDING_RULES
from tests import tiny


def specs(scheme: str) -> dict:
    model = nnx.eval_shape(lambda: Transformer(tiny.model_config(), find_scheme(scheme)(), nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model)))


def test_specs_name_the_axes_and_the_stack_has_none():
    found = specs("nag")
    assert found["blocks"]["attention"]["branch"]["query"] == P(None, "embed", "heads")
    assert found["blocks"]["mlp"]["gate"]["weight"] == P(None, "embed", None)
    assert found["embedding"]["tokens"] == P("vocab", "embed")


@pytest.mark.parametrize("scheme", ["nag", "review", "layer_norm"])
def test_with_rules_they_are_the_shardings_of_our_own_trainer(scheme):
    with flax.linen.logical_axis_rules(tuple(SHARDING_RULES.items())):
        found = specs(scheme)
    own = tiny.blueprint(tiny.run_config(find_scheme(scheme)()), fsdp=2, tensor=2)
    wanted = own.parameter_shardings()

    def padded(spec, length):
        return (*spec, *(None,) * (length - len(spec)))

    def compare(found, wanted, known):
        if isinstance(found, dict):
            assert found.keys() == wanted.keys()
            return [compare(found[key], wanted[key], known[key]) for key in found]
        whole = [
            axis if axis is None or size % 2 == 0 else None
            for axis, size in zip(padded(found, len(known.shape)), known.shape, strict=True)
        ]
        assert tuple(whole) == padded(wanted.spec, len(known.shape))

    compare(found, wanted, own.parameters)
