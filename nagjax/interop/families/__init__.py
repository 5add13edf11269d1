"""Model families in the formats of Hugging Face's transformers. There is one file per family, found by the `model_type`
of a config.json; to add one, nothing else has to be edited."""

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
    """A family's format has no field for a setting: names the field, and why."""

    def __init__(self, field: str, value: object, why: str):
        self.field, self.value, self.why = field, value, why
        super().__init__(f"{field} = {value!r}: {why}")


OPTIONS: dict[str, Callable[[ModelConfig], object]] = {  # settings that most families cannot express
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
    """Conversion to and from one family's format. read: the model and scheme that a config.json describes. tensors:
    where the file holds the parameters of a model with this config.json. write: the inverse of read; raises
    Inexpressible. prefix: the part of the tensors' names that files of a bare base model leave out. prepare: changes
    the file's tensors first, if one parameter comes from several of them. options: the keys of OPTIONS that the format
    can express."""

    model_types: tuple[str, ...]
    read: Callable[[dict], tuple[ModelConfig, Scheme]]
    tensors: Callable[[ModelConfig, dict], list[Tensor]]
    write: Callable[[ModelConfig, Scheme], dict]
    prefix: str = "model."
    prepare: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda files: files
    options: tuple[str, ...] = ()


def read_only(model: ModelConfig, scheme: Scheme) -> dict:
    """The `write` of a family that is only read, because other families can express its models. Raises
    Inexpressible."""
    raise Inexpressible("scheme", scheme.name, "this family is only read")


@cache
def families() -> tuple[Family, ...]:
    """Every family, in a fixed order."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found = (getattr(importlib.import_module(f"{__name__}.{name}"), "FAMILY", None) for name in modules)
    return tuple(family for family in found if family is not None)


def family_of(config: dict) -> Family:
    """The family of a config.json, by its `model_type`. Raises UserError, with the known types, for another."""
    kind = config.get("model_type")
    for family in families():
        if kind in family.model_types:
            return family
    known = ", ".join(sorted(kind for family in families() for kind in family.model_types))
    raise UserError("config.json: model_type", kind, f"is not a family nagjax reads; known: {known}")
