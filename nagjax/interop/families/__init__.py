"""Families of models in the formats of Hugging Face's transformers. One file per family, found by the `model_type` of a
config.json; nothing else to edit."""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from nagjax.errors import UserError
from nagjax.interop.tensors import Tensor
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme


class Inexpressible(Exception):
    """A family's format has no place for a setting: which field, and why."""

    def __init__(self, field: str, value: object, why: str):
        self.field, self.value, self.why = field, value, why
        super().__init__(f"{field} = {value!r}: {why}")


OPTIONS: dict[str, Callable[[ModelConfig], object]] = {  # that most families have no place for
    "causal": lambda model: not model.causal,
    "token_types": lambda model: model.token_types,
    "head_epsilon": lambda model: model.head_epsilon,
    "block.cca": lambda model: model.block.cca,
    "block.softcap": lambda model: model.block.softcap,
    "logit_softcap": lambda model: model.logit_softcap,
    "block.others.places": lambda model: model.block.others.places,
    "moe.experts": lambda model: model.moe.experts,
}


class Family(NamedTuple):
    """read: the model and scheme of a config.json. tensors: where the parameters of a model with this config.json are.
    write: the inverse of read; raises Inexpressible. prefix: of the tensors' names that a bare base model leaves out.
    prepare: changes the file's tensors first, where one parameter comes from several of them. options: those of
    OPTIONS that it has a place for."""

    model_types: tuple[str, ...]
    read: Callable[[dict], tuple[ModelConfig, Scheme]]
    tensors: Callable[[ModelConfig, dict], list[Tensor]]
    write: Callable[[ModelConfig, Scheme], dict]
    prefix: str = "model."
    prepare: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda files: files
    options: tuple[str, ...] = ()


def read_only(model: ModelConfig, scheme: Scheme) -> dict:
    """The `write` of a family whose models other families can express. Raises Inexpressible."""
    raise Inexpressible("scheme", scheme.name, "this family is only read")


@cache
def families() -> tuple[Family, ...]:
    """Every family, in a fixed order."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found = (getattr(importlib.import_module(f"{__name__}.{name}"), "FAMILY", None) for name in modules)
    return tuple(family for family in found if family is not None)


def family_of(config: dict) -> Family:
    """By a config.json's `model_type`. Raises UserError with what is known."""
    kind = config.get("model_type")
    for family in families():
        if kind in family.model_types:
            return family
    known = ", ".join(sorted(kind for family in families() for kind in family.model_types))
    raise UserError("model_type", kind, f"is not a family nagjax reads; known: {known}")
