"""Models and optimizers of a user's own around a residual of nagjax."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import nagjax.linen
from nagjax.errors import UserError
from nagjax.layers.where import Where
from nagjax.residual.schemes.nag import NAG
from nagjax.runs.config import OptimizerConfig
from nagjax.train.loss import Batch
from nagjax.train.own_model import constrain, decays, describe, optimizer
from nagjax.train.step import jit_train_step
from tests import tiny
from tests.own_models import SUBLAYERS, WIDTH, residual, residual_of, stacked, table_of

STEPS, SIDE, CLASSES = 20, 2, 5


class OwnViT(nnx.Module):
    """Classifies pictures of coloured patches, read one after the other: the branches of a Transformer of ours around
    `nagjax.NAG`, and nothing else of ours."""

    def __init__(self, model):
        self.patches = nnx.Param(model.embedding.tokens[...], role="embedding")
        self.branches = nnx.data(model.blocks)
        self.residual = residual_of(model)
        self.classes = nnx.Param(table_of(model), role="embedding")

    def __call__(self, patches, progress):
        where = Where.whole(*patches.shape)
        stream = self.residual.open(self.patches[...][patches], progress)
        for i in range(1, self.residual.sublayers + 1):
            block = jax.tree.map(lambda x, i=i: x[(i - 1) // 2], self.branches)
            x = self.residual.read(stream, i)
            update = block.attention.branch(x, where)[0] if i % 2 else block.mlp.branch(x)
            stream = self.residual.advance(stream, update, i)
        return self.residual.logits(stream, self.classes[...])[:, -1]


def pictures(seed: int) -> Batch:
    """Batches in the form of nagjax's trainer: only the last patch has a target, the picture's class."""
    colours = np.random.default_rng(seed).integers(0, 8, (tiny.BATCH, tiny.TOKENS), dtype=np.int32)
    targets, weights = np.zeros_like(colours), np.zeros(colours.shape, np.float32)
    targets[:, -1], weights[:, -1] = colours[:, :4].sum(1) % CLASSES, 1.0
    return Batch(
        colours,
        targets,
        np.ones_like(colours),
        np.tile(np.arange(tiny.TOKENS, dtype=np.int32), (tiny.BATCH, 1)),
        weights,
    )


def test_a_vit_with_its_own_optax_chain_is_trained_as_by_our_trainer():
    """Every parameter after 20 steps: gates at their rate, decay on matrices only, alpha's ramp, clipping."""
    config = tiny.run_config(
        NAG(ramp=0.5),
        optimizer={"lr": 1e-2, "schedule": "constant", "warmup": 0.25},
        train={"steps": STEPS},
        depth=2,
    )
    blueprint = tiny.blueprint(config)
    state = tiny.fresh(blueprint)
    own = OwnViT(blueprint.model(jax.device_get(state.params)))
    chain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(lambda n: 1e-2 * jnp.minimum((n + 1) / 5, 1.0), 0.9, 0.95, tiny.EPSILON, weight_decay=0.1),
    )
    trainer = nnx.Optimizer(own, optimizer(chain, own), wrt=nnx.Param)

    @nnx.jit
    def own_step(own, trainer, batch, progress):
        def loss(own):
            logits = own(batch.tokens, progress)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets[:, -1]).mean()

        value, grads = nnx.value_and_grad(loss)(own)
        trainer.update(own, grads)
        return value

    step, losses = jit_train_step(blueprint), []
    for i in range(STEPS):
        batch = pictures(i % 2)
        state, metrics = step(state, batch)
        losses.append((float(metrics.loss), float(own_step(own, trainer, batch, i / STEPS))))
    np.testing.assert_allclose(*np.array(losses).T, rtol=2e-4)
    assert losses[-1][1] < 0.5 * losses[0][1]
    ours = blueprint.model(jax.device_get(state.params))
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-5)  # noqa: E731
    close(own.patches[...], ours.embedding.tokens[...])
    close(own.classes[...], table_of(ours))
    jax.tree.map(close, jax.tree.leaves(own.residual), jax.tree.leaves(residual_of(ours)))
    for kind in ("attention", "mlp"):
        pairs = (getattr(model, kind).branch for model in (own.branches, ours.blocks))
        jax.tree.map(close, *map(jax.tree.leaves, pairs))


class Own(nnx.Module):
    """A model with one parameter of every kind."""

    def __init__(self, name: str = "nag", **options):
        rngs = nnx.Rngs(0)
        self.embedding = nnx.Embed(8, WIDTH, rngs=rngs)
        self.pos_embed = nnx.Param(jnp.ones((4, WIDTH)))
        self.cls_token = nnx.Param(jnp.ones((1, WIDTH)))
        self.stack = stacked()
        self.conv = nnx.Conv(2, 3, (2, 2), rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.kept = nnx.Param(jnp.ones((2, 2)), role="norm")
        self.statistics = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.residual = residual(name, **options)


def steps_of(tx, model, grads=1.0):
    """The first update of every parameter when all gradients are equal, by path."""
    own = optimizer(tx, model)
    params = nnx.state(model, nnx.Param)
    updates, _ = own.update(jax.tree.map(lambda p: jnp.full_like(p, grads), params), own.init(params), params)
    return {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(updates)}


def test_roles_of_ones_own_parameters():
    roles = {"/".join(path): of.role for path, of in describe(Own()).items()}
    assert {name: role for name, role in roles.items() if not name.startswith("residual")} == {
        "embedding/embedding": "embedding", "pos_embed": "embedding", "cls_token": "embedding",
        "stack/kernel": "matrix", "stack/bias": "norm", "conv/kernel": "matrix", "conv/bias": "norm",
        "norm/scale": "norm", "norm/bias": "norm", "kept": "norm",
        "statistics/scale": "norm", "statistics/bias": "norm",
    }  # fmt: skip
    assert {role for name, role in roles.items() if name.startswith("residual")} == {"gate"}
    with pytest.raises(UserError, match="gates"):
        describe({"x": nnx.Param(jnp.ones(2), role="gates"), "residual": residual()})


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.gamma = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Param(jnp.ones(WIDTH))


@pytest.mark.parametrize("kinds", [1, 2])
def test_the_axis_along_which_sublayers_are_stacked_makes_no_matrix_of_a_vector(kinds):
    listed = nnx.List([Scaled(nnx.Rngs(0))])
    rngs = nnx.Rngs(0)
    stacks = nnx.List([nnx.vmap(Scaled)(rngs.split(SUBLAYERS // kinds)) for _ in range(kinds)])
    flat = nnx.Linear(SUBLAYERS, WIDTH, use_bias=False, rngs=rngs)  # its first axis is as long, and no stack
    model = {"listed": listed, "stacks": stacks, "flat": flat, "residual": residual()}
    roles = {path: of.role for path, of in describe(model).items() if path[0] != "residual"}
    assert roles["flat", "kernel"] == "matrix"
    for where in (("listed", "0"), *(("stacks", str(kind)) for kind in range(kinds))):
        assert roles[*where, "gamma"] == roles[*where, "linear", "bias"] == "norm"
        assert roles[*where, "linear", "kernel"] == "matrix"


def test_gates_learn_at_their_rate_and_only_matrices_decay():
    model = Own()
    moved = steps_of(optax.sgd(1.0), model)
    for name, update in moved.items():
        np.testing.assert_allclose(update, -1.0 / 12 if name.startswith("residual") else -1.0, rtol=1e-6)
    decayed = steps_of(optax.adamw(1.0, weight_decay=0.5), model, grads=0.0)
    assert {name for name, update in decayed.items() if np.any(update != 0)} == {"stack/kernel", "conv/kernel"}
    np.testing.assert_allclose(decayed["stack/kernel"], -0.5 * model.stack.kernel[...], rtol=1e-6)
    mask = optax.adamw(1.0, weight_decay=0.5, mask=decays(model))
    params = nnx.state(model, nnx.Param)
    shown = optimizer(mask, model, hide=False)
    updates, _ = shown.update(jax.tree.map(jnp.zeros_like, params), shown.init(params), params)
    np.testing.assert_allclose(updates["stack"]["kernel"][...], decayed["stack/kernel"], rtol=1e-6)
    assert not np.any(updates["residual"]["gate"]["weight"][...])


def test_what_a_scheme_keeps_in_its_place_is_there_after_every_step():
    class Model(nnx.Module):
        def __init__(self):
            start = nnx.with_partitioning(nnx.initializers.normal(), (None, "embed"), eager_sharding=False)
            self.linear = nnx.Linear(3, WIDTH, kernel_init=start, rngs=nnx.Rngs(0))
            self.residual = residual("ngpt")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = constrain(Model())
        own = optimizer(optax.adam(0.1), model)
    lengths = lambda kernel: np.linalg.norm(kernel, axis=-1)  # noqa: E731
    np.testing.assert_allclose(lengths(model.linear.kernel[...]), 1.0, rtol=1e-5)
    params = nnx.state(model, nnx.Param)
    updates, _ = own.update(jax.tree.map(jnp.ones_like, params), own.init(params), params)
    np.testing.assert_allclose(lengths(optax.apply_updates(params, updates)["linear"]["kernel"][...]), 1.0, rtol=1e-5)
    with pytest.warns(UserWarning, match="2 of yours name no such"):
        optimizer(optax.adam(0.1), Own("ngpt"))


def test_start_factors_that_nobody_asked_for_are_said():
    for name, said in (("review", r"output 0\.5.*start_factors"), ("plain", "scaled_start"), ("deepnorm", "inner 0.5")):
        model = residual(name)
        with pytest.warns(UserWarning, match=said) as found:
            optimizer(optax.adam(1e-3), model)
        assert found[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.start_factors(1)
            optimizer(optax.adam(1e-3), model)
            optimizer(optax.adam(1e-3), residual("nag"))


def test_our_own_optimizer_by_its_config():
    model = Own()
    for config in (OptimizerConfig(schedule="constant", warmup=0.0), OptimizerConfig("muon", warmup=0.0)):
        moved = steps_of_config(config, model)
        assert all(np.isfinite(update).all() for update in moved.values())
    adam = steps_of_config(OptimizerConfig(schedule="constant", warmup=0.0, weight_decay=0.0, clip=0.0), model)
    rate = NAG().default_rate(WIDTH, 2)
    np.testing.assert_allclose(adam["stack/kernel"], -rate, rtol=1e-4)
    np.testing.assert_allclose(adam["residual/gate/alpha"], -rate / 12, rtol=1e-4)
    with pytest.raises(UserError, match="steps"):
        steps_of(OptimizerConfig(), model)
    with pytest.raises(UserError, match="cooldown = 0.2"):
        optimizer(OptimizerConfig(schedule="wsd", warmup=0.9), model, steps=STEPS)


def test_what_a_config_freezes_stays_and_has_no_state():
    model = Own()
    config = OptimizerConfig(freeze=("embedding", "stack.*"), warmup=0.0, schedule="constant", clip=1.0)
    moved = steps_of_config(config, model)
    still = {name for name, update in moved.items() if not np.any(update)}
    assert still == {"embedding/embedding", "pos_embed", "cls_token", "stack/kernel", "stack/bias"}
    params = nnx.state(model, nnx.Param)
    size = lambda tree: sum(x.size for x in jax.tree.leaves(tree) if jnp.ndim(x))  # noqa: E731
    left = {path: leaf for path, leaf in nnx.to_flat_state(params) if "/".join(map(str, path)) not in still}
    assert size(optimizer(config, model, steps=10).init(params)) == 2 * size(left)
    assert {name for name, update in steps_of_config(dataclasses.replace(config, optimizer="muon"), model).items()
            if not np.any(update)} == still  # fmt: skip
    for pattern, told in (("stak.*", "names no parameter"), ("*", "nothing to train")):
        with pytest.raises(UserError, match=told):
            optimizer(dataclasses.replace(config, freeze=(pattern,)), model, steps=10)


@pytest.mark.parametrize("tx", [OptimizerConfig(lr=0.1, warmup=0.0), optax.adamw(0.1)])
def test_of_a_model_with_adapters_only_they_learn(tx):
    from nagjax.layers.config import LoRAConfig

    model = nagjax.Transformer(tiny.model_config(lora=LoRAConfig(rank=2)), NAG(), rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    own = optimizer(tx, model, steps=10 if isinstance(tx, OptimizerConfig) else None)
    updates, _ = own.update(jax.tree.map(jnp.ones_like, params), own.init(params), params)
    moved = {path[-1] for path, leaf in nnx.to_flat_state(updates) if np.any(leaf[...])}
    assert moved == {"a", "b"}


@pytest.mark.parametrize("axes", [None, ("embed", "heads", None)])
def test_muon_takes_the_heads_of_flax_attention_together(axes):
    init = nnx.initializers.lecun_normal()
    init = nnx.with_partitioning(init, axes, eager_sharding=False) if axes else init

    class Model(nnx.Module):
        def __init__(self):
            self.attention = nnx.MultiHeadAttention(2, WIDTH, kernel_init=init, rngs=nnx.Rngs(0))
            self.conv = nnx.Conv(2, 3, (2, 2), kernel_init=init, rngs=nnx.Rngs(0))
            self.residual = residual()

    model = Model()
    params, noise = nnx.state(model, nnx.Param), np.random.default_rng(0)
    grads = jax.tree.map(jnp.ones_like, params)
    left, right = (np.linalg.qr(noise.standard_normal((WIDTH, WIDTH)))[0] for _ in range(2))
    for part in (own for name, own in grads["attention"].items() if name in ("query", "value", "out")):
        part["kernel"][...] = jnp.float32(left * np.linspace(0.2, 1.0, WIDTH) @ right).reshape(part["kernel"].shape)
    with pytest.warns(UserWarning, match=r"stacks of matrices.*: conv.kernel \[2, 2, 2, 3\]$"):
        own = optimizer(OptimizerConfig("muon", lr=1.0, warmup=0.0, weight_decay=0.0, clip=0.0), model, steps=10)
    updates, _ = own.update(grads, own.init(params), params)
    for name, shape in (("query", (WIDTH, -1)), ("value", (WIDTH, -1)), ("out", (-1, WIDTH))):
        update = np.asarray(updates["attention"][name]["kernel"][...]).reshape(shape)
        values = np.linalg.svd(update, compute_uv=False) / (0.2 * np.sqrt(max(update.shape)))
        assert np.all((values > 0.6) & (values < 1.3)), name  # as near to 1 as five iterations come


def steps_of_config(config, model):
    own, params = optimizer(config, model, steps=10), nnx.state(model, nnx.Param)
    updates, _ = own.update(jax.tree.map(jnp.ones_like, params), own.init(params), params)
    return {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(updates)}


def test_what_it_cannot_work_with_is_refused():
    with pytest.raises(UserError, match="model = 'Linear'"):
        optimizer(optax.adam(1e-3), nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    own = optimizer(optax.adam(1e-3), residual())
    with pytest.raises(UserError, match="params"):
        own.update({}, (), None)
    with pytest.raises(UserError, match="head"):
        own.init({"head": jnp.ones(2)})


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        branches = [nn.Dense(WIDTH, name=f"branch_{i}") for i in range(3)]
        return nagjax.linen.NAG(WIDTH, 3, options={"directions": 4}, name="residual")(x, branches, progress=1.0)


def test_linen_parameters_before_unbox():
    x = jnp.ones((2, WIDTH))
    boxed = LinenModel().init(jax.random.key(0), x)["params"]
    own, params = optimizer(optax.sgd(1.0), boxed), nn.unbox(boxed)
    updates, _ = own.update(jax.tree.map(jnp.ones_like, params), own.init(params), params)
    np.testing.assert_allclose(updates["residual"]["gate"]["alpha"], -1 / 12, rtol=1e-6)
    np.testing.assert_allclose(updates["branch_0"]["kernel"], -1.0)
    assert dataclasses.replace(NAG(directions=4)) == boxed["residual"]["gate"]["alpha"].scheme
    with pytest.raises(UserError, match="before unbox"):
        optimizer(optax.sgd(1.0), params)


class LinenSphere(nn.Module):
    @nn.compact
    def __call__(self, ids):
        start = nn.with_partitioning(nn.initializers.normal(1.0), (None, "embed"))
        x = nn.Embed(5, WIDTH, embedding_init=start, name="embed")(ids)
        branches = [nn.Dense(WIDTH, kernel_init=start, name=f"branch_{i}") for i in range(2)]
        return nagjax.linen.NGPT(WIDTH, 2, name="residual")(x, branches)


def test_boxes_of_ones_own_linen_parameters_name_their_axes():
    boxed = LinenSphere().init(jax.random.key(0), jnp.arange(3))["params"]
    roles = {"/".join(path): (of.role, of.axes) for path, of in describe(boxed).items()}
    assert roles["embed/embedding"] == ("embedding", (None, "embed"))
    assert roles["branch_0/kernel"] == ("matrix", (None, "embed"))
    lengths = lambda params: [  # noqa: E731
        np.linalg.norm(leaf, axis=-1)
        for leaf in (params["embed"]["embedding"], params["branch_0"]["kernel"], params["branch_1"]["kernel"])
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = optimizer(optax.adam(0.1), boxed)
    params = nn.unbox(constrain(boxed))
    for found in lengths(params):
        np.testing.assert_allclose(found, 1.0, rtol=1e-5)
    updates, _ = own.update(jax.tree.map(jnp.ones_like, params), own.init(params), params)
    for found in lengths(optax.apply_updates(params, updates)):
        np.testing.assert_allclose(found, 1.0, rtol=1e-5)


def test_a_scheme_keeps_in_place_what_is_nearest_to_its_module():
    sphere = nnx.Dict(residual=residual("ngpt"), kernel=nnx.Param(jnp.ones((2, 2))))
    known = describe({"sphere": sphere, "other": nnx.Dict(residual=residual(), kernel=nnx.Param(jnp.ones((2, 2))))})
    assert known["sphere", "kernel"].bound == (sphere.residual.scheme,) and not known["other", "kernel"].bound


def test_a_decider_learns_at_the_rate_of_gates_as_in_our_trainer():
    routed = nagjax.MixtureOfDepths(residual(), 0.5, rngs=nnx.Rngs(0), decider="predictor")
    rates = {path[1]: of.factors.rate for path, of in describe({"mod": routed}).items()}
    assert rates == {"residual": NAG.gate_rate, "routing": NAG.gate_rate}


def test_a_model_that_cannot_be_looked_into_is_named():
    class Closed(nnx.Module, pytree=False):
        def __init__(self):
            self.residual = residual()

    with pytest.raises(UserError, match="model = 'Closed': is not a pytree"):
        optimizer(optax.adamw(1e-3), Closed())
