"""The table of muP and CompleteP: factors, initial values, refusals, and steps of the optimizers that follow it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nagjax
from nagjax.errors import UserError
from nagjax.layers.config import BlockConfig
from nagjax.model.parametrization import Parametrization
from nagjax.model.transformer import Transformer
from nagjax.residual.registry import find_scheme, schemes
from nagjax.runs.config import OptimizerConfig, RatesConfig
from nagjax.train.optimizer import make_optimizer
from nagjax.train.own_model import describe
from nagjax.train.state import factors
from tests import tiny

WIDE = {"width": 32, "base_width": 8}  # m = 4
PLAIN, NAG = find_scheme("plain")(), find_scheme("nag")()
DEEP = find_scheme("completep")(base_depth=1, exponent=0.5)  # three blocks: n = 3


def table(scheme=PLAIN, **model) -> Parametrization:
    return Parametrization.of(tiny.model_config(**{"parametrization": "mup"} | WIDE | model), scheme)


def values(own) -> tuple[float, float, float]:
    return own.rate, own.decay, own.epsilon


def test_factors_by_kind():
    want = {
        ("matrix", ("embed", "mlp")): (1 / 4, 4, 1 / 4),
        ("embedding", ("vocab", "embed")): (1, 1, 1 / 4),
        ("head", ("vocab", "embed")): (1 / 4, 4, 1),
        ("norm", ("embed",)): (1, 1, 1 / 4),
        ("gate", ()): (1, 1, 1 / 4),
        ("gate", ("embed_out",)): (1, 1, 1 / 4),  # a bias, or a gain per feature
        ("gate", ("embed",)): (1 / 4, 4, 1 / 4),  # a product with the residual
        ("gate", ("embed", None)): (1 / 4, 4, 1 / 4),
        ("gate", (None, "embed")): (1 / 4, 4, 1 / 4),  # skip_class: a row for each class
        ("gate", (None, None, "embed_out")): (1, 1, 1 / 4),
    }
    for (role, axes), expected in want.items():
        assert values(table().factors(role, axes)) == pytest.approx(expected), (role, axes)
        assert values(Parametrization().factors(role, axes)) == (1, 1, 1)
    assert values(table(NAG).factors("embedding", ("vocab", "embed"))) == pytest.approx((1 / 2, 2, 1 / 2))
    assert values(table().factors("matrix", (), muon=True)) == pytest.approx((1 / 2, 2, 1 / 4))
    assert table().factors("gate", ("embed",), muon=True, own_rate=0.5).rate == pytest.approx(1 / 8)


def test_completep_follows_the_depth_too():
    deep = table(DEEP, parametrization="completep")
    root = 3**-0.5
    assert values(deep.factors("matrix", ("embed", "mlp"))) == pytest.approx((root / 4, 4, root / 4))
    assert values(deep.factors("norm", ("embed",))) == pytest.approx((root, 1, root / 4))
    assert values(deep.factors("norm", ("embed",), in_block=False)) == pytest.approx((1, 1, 1 / 4))
    assert values(deep.factors("embedding", ("vocab", "embed"))) == pytest.approx((1, 1, 1 / 4))
    assert values(deep.factors("head", ("vocab", "embed"))) == pytest.approx((1 / 4, 4, 1))
    one = dataclasses.replace(DEEP, exponent=1.0)
    assert values(table(one, parametrization="completep").factors("matrix", ())) == pytest.approx((1 / 4, 4, 1 / 12))


def test_the_norm_of_the_head_knows_no_depth():
    """Its rate and epsilon are those of one block, in a run's own model and in anybody's loop."""
    config = tiny.run_config(DEEP, parametrization="completep", **WIDE)
    blueprint = tiny.blueprint(config)
    own = factors(blueprint)
    found = jax.tree_util.tree_leaves_with_path(own)
    norms = {str(path[0].key): values(of) for path, of in found if of.role == "norm"}
    assert norms.pop("blocks") == pytest.approx((3**-0.5, 1, 3**-0.5 / 4))
    assert norms and all(one == pytest.approx((1, 1, 1 / 4)) for one in norms.values())
    described = describe(Transformer(config.model, DEEP, rngs=nnx.Rngs(0)))
    assert {path[0]: values(of.factors) for path, of in described.items() if of.factors.role == "norm"} == {
        "blocks": pytest.approx((3**-0.5, 1, 3**-0.5 / 4)),
        **norms,
    }


def test_default_rates_are_those_of_the_base():
    peak = lambda scheme, **model: OptimizerConfig().peak(scheme, tiny.model_config(**WIDE | model))  # noqa: E731
    assert peak(PLAIN, parametrization="mup") == pytest.approx(8e-3 * 64 / 8)
    assert peak(PLAIN) == pytest.approx(8e-3 * 64 / 32)
    assert peak(DEEP, parametrization="completep") == pytest.approx(8e-3 * 64 / 8)
    assert OptimizerConfig(lr=0.5).peak(DEEP, tiny.model_config(parametrization="completep", **WIDE)) == 0.5


def spread(scheme=PLAIN, **model) -> dict[str, float]:
    """Standard deviations of initial values, by the names of their parameters."""
    config = tiny.run_config(scheme, **{"vocab": 64} | model)
    leaves = jax.tree_util.tree_leaves_with_path(tiny.blueprint(config).init_params(0))
    return {"/".join(str(key.key) for key in path): float(jnp.std(leaf)) for path, leaf in leaves}


def test_start_values():
    blocks = "blocks/mlp/branch/"
    usual, mup = spread(width=32), spread(parametrization="mup", **WIDE)
    same = {name for name in usual if mup[name] == usual[name]}
    assert same == usual.keys() - {"head/tokens"}
    assert mup["head/tokens"] == pytest.approx(usual["head/tokens"] / 2, rel=1e-6)
    papers = spread(width=32, init_std=0.02)
    for name in (blocks + "up", blocks + "gate", "blocks/attention/branch/query", "embedding/tokens", "head/tokens"):
        assert papers[name] == pytest.approx(0.02, rel=0.1), name
    assert papers[blocks + "down"] == pytest.approx(0.02 * 6**-0.5, rel=0.1)  # GPT-2's own factor, six sublayers
    both = spread(init_std=0.02, parametrization="mup", **WIDE)
    for name, root in ((blocks + "up", 1), ("embedding/tokens", 0), ("head/tokens", 2)):
        assert both[name] == pytest.approx(papers[name] / 2**root, rel=1e-6), name
    cca = {"block": BlockConfig(cca=True, head_width=8)}
    narrow, both = (spread(init_std=0.02, parametrization="mup", **size, **cca) for size in ({"width": 32}, WIDE))
    mix = "blocks/attention/branch/key_convolution/mix"  # sums over one head's features, as many at every width
    assert both[mix] == pytest.approx(0.02, rel=0.1) and narrow[mix] == pytest.approx(0.02, rel=0.1)
    encoder = spread(init_std=0.02, causal=False, head_epsilon=1e-5)
    assert encoder["transform/map"] == pytest.approx(0.02, rel=0.1)
    tied = spread(init_std=0.02, tied=True)
    assert tied["embedding/tokens"] == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("scheme", [PLAIN, NAG], ids=lambda scheme: scheme.name)
def test_first_logits_shrink_with_the_root_of_the_width(scheme):
    def first(**model) -> float:
        config = tiny.run_config(scheme, **{"vocab": 64, "width": 32} | model)
        live = tiny.blueprint(config).model(tiny.blueprint(config).init_params(0))
        return float(jnp.std(live.logits(live(jnp.arange(64).reshape(8, 8)))))

    assert first() / first(parametrization="mup", **WIDE) == pytest.approx(2, rel=1e-4)


def test_the_optimizer_follows_in_numpy():
    """AdamW from its definition, with the factors on rate, decay and epsilon, where epsilon counts."""
    config = tiny.run_config(PLAIN, optimizer={"lr": 0.1, "clip": 0.0, "warmup": 0.0, "epsilon": 1e-3}, **WIDE)
    mup = dataclasses.replace(config, model=dataclasses.replace(config.model, parametrization="mup"))
    blueprint = tiny.blueprint(mup)
    params = jax.tree.map(lambda p: jnp.full(p.shape, 2.0), blueprint.parameters)
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 4e-3), blueprint.parameters)
    updates, _ = jax.jit(blueprint.optimizer.update)(grads, blueprint.optimizer.init(params), params)
    want = {"matrix": (1 / 4, 4, 1 / 4), "embedding": (1, 0, 1 / 4), "head": (1 / 4, 0, 1), "norm": (1, 0, 1 / 4)}
    seen = set()
    for own, update in zip(jax.tree.leaves(blueprint.parameters), jax.tree.leaves(updates), strict=True):
        rate, decay, epsilon = want[own.role]
        step = 4e-3 / (4e-3 + 1e-3 * epsilon) + 0.1 * decay * 2.0
        np.testing.assert_allclose(np.asarray(update), -0.1 * rate * step, rtol=1e-5, err_msg=own.role)
        seen.add(own.role)
    assert seen == want.keys()


def test_rates_and_decay_by_role():
    roles = {"matrix": "m", "embedding": "e", "head": "h", "norm": "n", "gate": "g"}
    own = {name: Parametrization().factors(role, ("embed",)) for role, name in roles.items()}
    config = OptimizerConfig(
        clip=0.0,
        warmup=0.0,
        weight_decay=0.5,
        rates=RatesConfig(embedding=3.0, head=0.5, norm=0.0, gate=2.0),
        decay=("embedding", "gate"),
    )
    tx, params = make_optimizer(config, 0.1, 10, own), {name: jnp.full((2, 2), 2.0) for name in own}
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    found = {name: float(update[0, 0]) / -0.1 for name, update in updates.items()}
    assert found == pytest.approx({"m": 1.0, "e": 3 * 2.0, "h": 0.5, "n": 0.0, "g": 2 * 2.0}, rel=1e-5)


def test_muon_s_update_has_one_spectral_norm_at_every_width():
    def norm(width: int, **model) -> float:
        optimizer = {"optimizer": "muon", "lr": 1.0, "warmup": 0.0, "weight_decay": 0.0}
        config = tiny.run_config(PLAIN, optimizer=optimizer, width=width, base_width=8, heads=1, **model)
        own, noise = factors(tiny.blueprint(config))["blocks"]["attention"]["branch"]["query"], np.random.default_rng(0)
        tx = make_optimizer(config.optimizer, 1.0, 10, {"query": own})
        grads = {"query": jnp.asarray(noise.standard_normal((1, width, width)), jnp.float32)}
        updates, _ = tx.update(grads, tx.init(grads), grads)
        return float(np.mean(np.linalg.svd(updates["query"][0], compute_uv=False)))

    assert norm(32, parametrization="mup") == pytest.approx(norm(8), rel=0.15)
    assert norm(32) == pytest.approx(2 * norm(8), rel=0.15)


def test_what_has_no_meaning_is_refused():
    with pytest.raises(UserError, match="tied = True"):
        tiny.run_config(PLAIN, tied=True, parametrization="mup")
    for name in sorted(schemes()):
        scheme = find_scheme(name)()
        if scheme.constrains:
            with pytest.raises(UserError, match="parametrization = 'mup'.* sphere"):
                tiny.run_config(scheme, parametrization="mup")
        elif name != "completep":
            with pytest.raises(UserError, match="parametrization = 'completep'.*--scheme completep"):
                Transformer(tiny.model_config(parametrization="completep"), scheme, nnx.Rngs(0))


def test_the_door_s_optimizer_follows_a_transformer():
    model = Transformer(tiny.model_config(parametrization="mup", **WIDE), PLAIN, nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    ones = jax.tree.map(jnp.ones_like, params)

    def moved(tx) -> dict[str, float]:
        updates, _ = tx.update(ones, tx.init(params), params)
        flat = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(updates)}
        return {
            name: float(flat[name].ravel()[0]) for name in ("blocks/mlp/branch/up", "embedding/tokens", "head/tokens")
        }

    with pytest.warns(UserWarning, match="not its weight decay and epsilon"):
        chain = nagjax.optimizer(optax.sgd(1.0), model)
    assert list(moved(chain).values()) == pytest.approx([-1 / 4, -1, -1 / 4])
    config = OptimizerConfig(warmup=0.0, clip=0.0, weight_decay=0.0)
    peak = 8e-3 * 64 / 8
    assert list(moved(nagjax.optimizer(config, model, steps=10)).values()) == pytest.approx(
        [-peak / 4, -peak, -peak / 4], rel=1e-3
    )
