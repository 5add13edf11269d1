"""Models whose matrices are stored for inference: in the dtype of computation, or in 8 bits."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
from flax import nnx

from nagjax.errors import UserError
from nagjax.layers.int8 import Quantized, quantized
from nagjax.layers.lora import GROUPS
from nagjax.model.transformer import Transformer
from nagjax.ranges import check_value
from nagjax.runs.opening import OpenRun

Weights = Literal["full", "int8"]
MATRICES = {name for names in GROUPS.values() for name in names}  # of plain matmuls: no router, no convolution

_matrix = jax.jit(quantized)
_table = jax.jit(lambda scheme, table: quantized(scheme.head_rows(table), over=-1), static_argnums=0)


def _is_matrix(path: tuple) -> bool:
    """Whether the path is that of a matrix of attention, MLP or experts."""
    names = _names(path)
    return names[-2:-1] == ["branch"] and names[-1] in MATRICES


def _names(path: tuple) -> list[str]:
    return [jax.tree_util.keystr((part,), simple=True) for part in path]


def _changed(model: Transformer, one: Callable[[tuple, nnx.Variable], nnx.Variable]) -> Transformer:
    """The model with every parameter replaced by `one(path, variable)`."""
    graph, params = nnx.split(model)
    is_leaf = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(one, params, is_leaf=is_leaf))


def narrow_model(model: Transformer) -> Transformer:
    """The model with the matrices of attention, MLP and experts stored in the dtype of computation, and the head's
    table too if its scheme uses it unchanged. Every pass would cast them; here that is done once, and the logits stay
    the same, bit for bit. Returns the model itself if nothing changes, or if it has adapters, which are added to a
    matrix before the cast."""
    if model.config.lora.rank:
        return model
    dtype, scheme = model.config.compute_dtype, model.scheme
    changed = []

    def one(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        value = variable[...]
        if isinstance(value, Quantized) or value.dtype == dtype:
            return variable
        if not _is_matrix(path) and not (_names(path) == ["head", "tokens"] and scheme.head_rows(value) is value):
            return variable
        changed.append(path)
        return variable.replace(value.astype(dtype))

    narrow = _changed(model, one)
    return narrow if changed else model


def int8_model(model: Transformer) -> Transformer:
    """The model with the matrices of attention, MLP and experts, and the head's table, stored as 8-bit integers with
    one float32 scale per output channel (`nagjax.layers.int8`); for passes without gradients.

    Routers, convolutions, gates, gains and biases stay as they are. So does the embedding, unless it is also the head's
    table; and so does a tied table that the scheme's head normalises (NAG's).

    Raises UserError for adapters that are not merged, and for parameters spread over several devices.
    """
    if model.config.lora.rank:
        raise UserError("weights", "int8", "the model has adapters: merge them first, as opening its run does")
    if any(len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves(nnx.state(model))):
        raise UserError("weights", "int8", "is for one device: open the run on one")
    tied, scheme = model.config.tied, model.scheme

    def one(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        value = variable[...]
        if isinstance(value, Quantized):
            return variable
        if _names(path) == (["embedding", "tokens"] if tied else ["head", "tokens"]):
            return (
                variable if tied and scheme.head_rows(value) is not value else variable.replace(_table(scheme, value))
            )
        return variable.replace(_matrix(value)) if _is_matrix(path) else variable

    return _changed(model, one)


def with_weights(run: OpenRun, weights: Weights) -> OpenRun:
    """The run with its weights converted by `narrow_model` ("full") or `int8_model` ("int8"). Raises UserError for
    other names, and whatever those functions raise."""
    check_value("weights", weights, Weights)
    model = int8_model(run.model) if weights == "int8" else narrow_model(run.model)
    return run if model is run.model else dataclasses.replace(run, params=nnx.to_pure_dict(nnx.state(model)))
