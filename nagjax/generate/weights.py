"""Models with their matrices in 8 bits, to be sampled from."""

import dataclasses
from typing import Literal

import jax
from flax import nnx

from nagjax.errors import UserError
from nagjax.layers.int8 import quantized
from nagjax.layers.lora import GROUPS
from nagjax.model.transformer import Transformer
from nagjax.runs.opening import OpenRun

Weights = Literal["full", "int8"]
MATRICES = {name for names in GROUPS.values() for name in names}  # those of plain products: no router, no convolution

_matrix = jax.jit(quantized)
_table = jax.jit(lambda scheme, table: quantized(scheme.head_rows(table), over=-1), static_argnums=0)


def int8_model(model: Transformer) -> Transformer:
    """The model with the matrices of attention, MLP and experts, and the head's table, as 8-bit integers and a float32
    scale per output channel (`nagjax.layers.int8`); for passes without gradients.

    Routers, convolutions, gates, gains and biases stay as they are. So does the embedding, unless it is the head's
    table too, and a tied table that the scheme's head normalises (NAG's).

    Raises UserError: adapters that are not merged, or parameters over several devices.
    """
    graph, params = nnx.split(model)
    if model.config.lora.rank:
        raise UserError("weights", "int8", "the model has adapters: merge them first, as opening its run does")
    if any(len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves(params)):
        raise UserError("weights", "int8", "is for one device: open the run on one")
    tied, scheme = model.config.tied, model.scheme

    def one(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        names, value = [str(part.key) for part in path], variable[...]
        if names == (["embedding", "tokens"] if tied else ["head", "tokens"]):
            return (
                variable if tied and scheme.head_rows(value) is not value else variable.replace(_table(scheme, value))
            )
        matrix = names[-2:-1] == ["branch"] and names[-1] in MATRICES
        return variable.replace(_matrix(value)) if matrix else variable

    is_leaf = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(one, params, is_leaf=is_leaf))


def with_weights(run: OpenRun, weights: Weights) -> OpenRun:
    """The run with its weights as they are ("full"), or as `int8_model` has them. Raises what that raises."""
    if weights == "full":
        return run
    return dataclasses.replace(run, params=nnx.to_pure_dict(nnx.state(int8_model(run.model))))
