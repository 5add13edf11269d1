"""Which parameters form the optimizer's gate group: the scheme's own rate, no decay, never Muon."""

import jax
import pytest

from nagjax.residual import find_scheme
from nagjax.residual.schemes.review import Review
from tests import tiny

SUBLAYER = "['blocks']['{}']['gate']['{}']"


def own(*names):
    return {SUBLAYER.format(branch, name) for branch in ("attention", "mlp") for name in names}


GATES = {
    "plain": (find_scheme("plain")(), set(), 1.0),
    "lns": (find_scheme("lns")(), set(), 1.0),
    "highway": (find_scheme("highway")(), own("weight", "bias"), 1.0),
    "highway_convex": (find_scheme("highway_convex")(), own("weight", "bias"), 1.0),
    "review": (Review(), own("state", "update", "bias"), 1.0),
    "review_low_rank": (Review(rank=2), own("down", "up", "bias"), 1.0),
    "nag": (
        find_scheme("nag")(),
        own("weight", "bias", "logits", "beta", "alpha") | {"['ends']['encode']", "['ends']['decode']"},
        1 / 12,
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_gate_group(name):
    scheme, gates, rate = GATES[name]
    roles = {
        jax.tree_util.keystr(path): parameter.role
        for path, parameter in jax.tree_util.tree_leaves_with_path(tiny.blueprint(tiny.run_config(scheme)).parameters)
    }
    assert {path for path, role in roles.items() if role == "gate"} == gates
    assert scheme.gate_rate == pytest.approx(rate)
    assert all(roles[path] == "matrix" for path in roles if "['branch']" in path)
    assert (roles["['embedding']['tokens']"], roles["['head']['tokens']"]) == ("embedding", "head")
    assert all(roles[path] == "norm" for path in roles if path.endswith("['gain']"))
