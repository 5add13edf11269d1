"""Decides whether a model family of transformers can express a run's model, and with which parameters."""

import dataclasses

import jax
import jax.numpy as jnp

from nagjax.errors import UserError
from nagjax.interop.adapter import adapted_schemes
from nagjax.interop.families import OPTIONS, Family, Inexpressible, families
from nagjax.interop.load_tensors import flat
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.lns import LNS
from nagjax.residual.schemes.plain import Plain
from nagjax.runs.opening import OpenRun


def unadapted(model: ModelConfig) -> tuple[str, object] | None:
    """A setting that the bundle's adapter does not support, and its value; None if it supports all."""
    values = {name: value(model) for name, value in OPTIONS.items()}
    values["block.rope.scaling"] = model.block.rope.scaling in ("yarn", "longrope") and model.block.rope.scaling
    return next(((name, value) for name, value in values.items() if value), None)


def other_way(scheme: Scheme, model: ModelConfig) -> str:
    """Advice for a run that no plain format can express."""
    if scheme.name in adapted_schemes():
        missing = unadapted(model)
        if missing is None and model.mod.active:
            return "use --format bundle, which nagjax.load reads; the AutoModel adapter in it has no Mixture-of-Depths"
        if missing is None:
            return "use --format bundle, which nagjax.load and the AutoModel adapter in it read"
        return f"nor can a bundle, whose adapter has no {missing[0]}; nagjax.load reads the run itself"
    return f"nor can a bundle, whose adapter has {', '.join(adapted_schemes())}; nagjax.load reads the run itself"


@dataclasses.dataclass(frozen=True)
class Expressed:
    """A model as a family expresses it: its config.json, and its parameters by dotted path (blocks stacked)."""

    family: Family
    model: ModelConfig
    values: dict
    params: dict[str, jax.Array]


def express(run: OpenRun) -> Expressed:
    """The run's model as a family expresses it. Raises UserError naming a setting that no family can express."""
    model, scheme, params = run.config.model, run.config.scheme, flat(run.params)
    instead = other_way(scheme, model)
    if model.mod.active:
        raise UserError(*model.mod.named(), f"plain formats run every sublayer on every token: {instead}")
    if model.block.cca:
        raise UserError("block.cca", True, f"plain formats have no place for its convolutions; {instead}")
    model, scheme, params = _as_plain(model, scheme, params)
    refused = []
    for family in families():
        try:
            values = family.write(model, scheme)
            for name in OPTIONS:
                if name not in family.options and (value := OPTIONS[name](model)):
                    raise Inexpressible(name, value, f"{values['model_type']} has no place for it")
            return Expressed(family, model, values, params)
        except Inexpressible as why:
            if not model.moe.experts or "moe.experts" in family.options:  # no other is near to a model with experts
                refused.append(why)
    finer = [why for why in refused if why.field not in ("mlp", "positions")]
    nearest = next((why for why in [*finer, *refused] if why.field != "scheme"), None)
    if nearest is None:
        fix = f"no plain format has its residual: {instead}"
        raise UserError("scheme", run.config.scheme.name, fix)
    fix = f"the nearest plain format cannot express it: {nearest.why}; {instead}"
    raise UserError(nearest.field, nearest.value, fix)


def _as_plain(model: ModelConfig, scheme: Scheme, params: dict) -> tuple[ModelConfig, Scheme, dict]:
    """Folds LayerNorm Scaling's factors into the gains, and gives queries and keys that are normalised without gains
    gains of 1."""
    if type(scheme) is LNS:  # type(), because a scheme derived from it differs
        scales = jax.vmap(scheme.read_scale)(jnp.asarray(model.indices)).reshape(-1, 2)
        for i, kind in enumerate(("attention", "mlp")):
            path = f"blocks.{kind}.entry.gain"
            params = params | {path: scales[:, i, None] * params[path]}
        scheme = Plain(epsilon=scheme.epsilon)
    if type(scheme) is Plain and model.qk_norm and model.block.qk_gain == "none":
        ones = jnp.ones((model.depth, model.head_width))
        params = params | {f"blocks.attention.branch.{name}_gain": ones for name in ("query", "key")}
        model = dataclasses.replace(model, block=dataclasses.replace(model.block, qk_gain="head"))
    return model, scheme, params
