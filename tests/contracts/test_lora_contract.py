"""Every scheme takes adapters: the model beside which they stand is the one that they are merged into."""

import jax
import numpy as np
import pytest

from nagjax.layers.config import LoRAConfig
from nagjax.layers.lora import merged
from nagjax.layers.platform import tracing_for
from nagjax.residual import find_scheme
from nagjax.runs.trained import with_part
from tests import meshes, tiny
from tests.contracts.variants import SCHEMES
from tests.streams import one_per_stream
from tests.tolerance import assert_close

LORA = LoRAConfig(rank=2, alpha=6.0)
XLA = {"attention": "xla", "kernels": "xla"}  # what all platforms have: this CPU stands for another one


def adapted(scheme):
    """The blueprint of a model with adapters, and its parameters, none of which is special."""
    bp, noise = tiny.blueprint(tiny.run_config(scheme, lora=LORA, **XLA)), np.random.default_rng(0)
    drawn = jax.tree.map(lambda p: 0.2 * noise.standard_normal(p.shape).astype(np.float32), bp.parameters)
    return bp, with_part(drawn, tiny.start(scheme).params)


def logits(bp, params):
    """As another platform than a CPU is served, where adapters are not added up first."""
    model = lambda p: (m := bp.model(p)).logits(m(tiny.packed_batch().tokens))  # noqa: E731
    with tracing_for("tpu"):
        return jax.jit(model)(params)


@pytest.mark.parametrize("name", SCHEMES if meshes.EVERY else one_per_stream())
def test_adapters_on_any_mesh_or_none_are_their_merged_model(name):
    scheme = SCHEMES[name]()
    bp, params = adapted(scheme)
    plain = tiny.blueprint(tiny.run_config(scheme, **XLA))
    want = logits(plain, merged(params, LORA))
    assert_close(logits(bp, params), want, **tiny.FORWARD)
    assert np.abs(want - logits(plain, jax.device_get(tiny.start(scheme).params))).max() > 0.01


def test_matrices_of_ngpt_are_not_normalised_again():
    """What a projection follows is an update: matrices of unit vectors become the plain sum with their adapters."""
    scheme = find_scheme("ngpt")()
    _, params = adapted(scheme)
    project = tiny.blueprint(tiny.run_config(scheme, **XLA)).constrained
    unit = project(tiny.start(scheme).params)
    whole = merged(with_part(params, unit), LORA)
    again = project(whole)
    for kind, own in params["blocks"].items():
        for name, parts in own["lora"].items():
            one, other = (tree["blocks"][kind]["branch"][name] for tree in (whole, again))
            product = LORA.scale * np.asarray(parts["a"]) @ np.asarray(parts["b"])
            assert_close(one, unit["blocks"][kind]["branch"][name] + product, terms=2, chain=2)
            assert np.abs(one - other).max() > 0.1
