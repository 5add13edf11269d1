"""Residuals around small branches, and a Transformer's parameters in a model that is not a Transformer."""

import jax
import jax.numpy as jnp
from flax import nnx

from nagjax.model.transformer import Transformer
from nagjax.residual import find_scheme
from nagjax.residual.module import Residual, module_of

WIDTH, SUBLAYERS = 16, 4


def residual(name: str = "nag", sublayers: int = SUBLAYERS, **options) -> Residual:
    return module_of(find_scheme(name))(WIDTH, sublayers, rngs=nnx.Rngs(0), **options)


def stacked(seed: int = 1, sublayers: int = SUBLAYERS) -> nnx.Module:
    """One linear branch for each sublayer."""
    make = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
    return make(nnx.Rngs(seed).split(sublayers))


def residual_of(model: Transformer) -> Residual:
    """The module with the model's gates, entries and ends."""
    own = Residual(model.scheme, model.config.width, model.config.sublayers, rngs=nnx.Rngs(0))
    attention, mlp = model.blocks.attention, model.blocks.mlp
    own.gate = _put(own.gate, _in_turn(attention.gate, mlp.gate))
    last = jax.tree.leaves(model.entry)
    entries = zip(_in_turn(attention.entry, mlp.entry), last, strict=True)
    own.entry = _put(own.entry, [jnp.concatenate([each, end[None]]) for each, end in entries])
    own.ends = _put(own.ends, jax.tree.leaves(model.ends))
    return own


def branches_of(model: Transformer, where) -> list:
    """Callables, sublayer after sublayer."""
    found = []
    for i in range(model.config.depth):
        block = jax.tree.map(lambda x, i=i: x[i], model.blocks)
        found += [lambda x, own=block.attention.branch: own(x, where)[0], block.mlp.branch]
    return found


def table_of(model: Transformer) -> jax.Array:
    return (model.head or model.embedding).tokens[...]


def _in_turn(first, second) -> list:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return [jnp.stack(pair, axis=1).reshape(-1, *pair[0].shape[1:]) for pair in pairs]


def _put(module, leaves):
    return jax.tree.unflatten(jax.tree.structure(module), leaves)
