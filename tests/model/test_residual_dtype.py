"""A float32 residual beside branches in bfloat16, for every scheme."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.layers.mlp import MLP
from nagjax.mod.config import ModConfig
from nagjax.model.transformer import Transformer
from nagjax.plan.saved import saved_bytes
from nagjax.residual.registry import find_scheme, schemes
from tests import tiny

TOKENS = jax.random.randint(jax.random.key(0), (4, tiny.TOKENS), 0, tiny.VOCAB)
MIXED = {"dtype": "bfloat16", "residual_dtype": "float32"}


@pytest.mark.parametrize("name", sorted(schemes()))
def test_the_stream_is_float32_and_branches_are_not(name, monkeypatch):
    read = []
    compute = MLP.__call__
    monkeypatch.setattr(MLP, "__call__", lambda self, x: read.append(x.dtype) or compute(self, x))

    def around(model, stream, call):
        assert {leaf.dtype for leaf in jax.tree.leaves(stream) if leaf.ndim > 2} == {jnp.dtype("float32")}
        after = model.sublayers(stream, *call)[1].stream
        assert jax.tree.map(jnp.dtype, after) == jax.tree.map(jnp.dtype, stream)
        return after, ()

    model = nnx.eval_shape(lambda: Transformer(tiny.model_config(**MIXED), find_scheme(name)(), nnx.Rngs(0)))
    output = jax.eval_shape(lambda model: model(TOKENS, intervene=around), model)
    assert output.hidden.dtype == jnp.bfloat16 and output.log_scale.dtype == jnp.float32
    assert set(read) == {jnp.dtype("bfloat16")}


def seen(**changes):
    """What the head reads, and the gradient of its sum of squares."""
    model = Transformer(tiny.model_config(depth=16, **changes), find_scheme("plain")(), nnx.Rngs(0))
    graph, params = nnx.split(model)

    def total(params):
        hidden = nnx.merge(graph, params)(TOKENS).hidden.astype(jnp.float32)
        return jnp.sum(hidden * jnp.cos(jnp.arange(hidden.size).reshape(hidden.shape))), hidden

    grads, hidden = jax.jit(jax.grad(total, has_aux=True))(params)
    return np.asarray(hidden), np.asarray(grads.embedding.tokens[...])


def test_it_is_nearer_to_float32():
    exact, mixed, narrow = seen(), seen(**MIXED), seen(dtype="bfloat16")
    for want, some, less in zip(exact, mixed, narrow, strict=True):
        error = lambda found, want=want: np.sqrt(np.mean((found - want) ** 2)) / np.sqrt(np.mean(want**2))  # noqa: E731
        assert error(some) < 0.75 * error(less), (error(some), error(less))
        assert error(less) < 0.1


@pytest.mark.parametrize("kv", ["all", "selected"])
def test_routed_sublayers_compute_in_bfloat16_too(kv):
    mod = ModConfig(rate=(0.5,), kv=kv)
    make = lambda: Transformer(tiny.model_config(mod=mod, **MIXED), find_scheme("nag")(), nnx.Rngs(0))  # noqa: E731
    output = jax.eval_shape(lambda model: model(TOKENS), nnx.eval_shape(make))
    assert output.hidden.dtype == jnp.bfloat16
    cut = jnp.zeros(6)
    for room in (0, tiny.TOKENS):
        causal = jax.eval_shape(
            lambda model, room=room: model(
                TOKENS, cuts=cut, causal=True, cache=model.empty_cache(len(TOKENS), room) if room else None
            ),
            nnx.eval_shape(make),
        )
        assert causal.hidden.dtype == jnp.bfloat16
        floats = {leaf.dtype for leaf in jax.tree.leaves(causal.cache) if leaf.ndim > 3}
        assert floats == ({jnp.dtype("bfloat16")} if room else set())


def test_where_both_are_one_dtype_nothing_changes():
    text = lambda **changes: str(  # noqa: E731
        jax.make_jaxpr(lambda model: model(TOKENS).hidden)(
            nnx.eval_shape(lambda: Transformer(tiny.model_config(**changes), find_scheme("lns")(), nnx.Rngs(0)))
        )
    )
    assert text(residual_dtype="float32") == text()


@pytest.mark.parametrize("name, leaves", [("plain", 2), ("nag", 1)])
def test_what_it_costs_between_blocks(name, leaves):
    """Two bytes more for every value of the stream that the backward pass starts a block from."""

    def saved(**changes) -> int:
        config = tiny.model_config(dtype="bfloat16", remat="block", **changes)
        model = nnx.eval_shape(lambda: Transformer(config, find_scheme(name)(), nnx.Rngs(0)))
        graph, params = nnx.split(model)
        total = lambda params: jnp.sum(nnx.merge(graph, params)(TOKENS).hidden.astype(jnp.float32))  # noqa: E731
        return saved_bytes(jax.make_jaxpr(jax.grad(total))(params).jaxpr, TOKENS.shape[0], {})

    assert saved(residual_dtype="float32") - saved() == 2 * leaves * 3 * TOKENS.size * 16
