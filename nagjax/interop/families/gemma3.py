"""Gemma 3, of text alone: Gemma 2 with normalised queries and keys, five blocks of six with a window, and a rotary of
their own for the sixth."""

from nagjax.errors import UserError
from nagjax.interop.families import Family
from nagjax.interop.families.common import FULL, SLIDING, read_scaling, refuse, write_scaling
from nagjax.interop.families.gemma import norms, scaled_embedding
from nagjax.interop.families.gemma2 import NORMS, OPTIONS, query_scale, read_common, read_kinds, write_sandwich
from nagjax.interop.tensors import ATTENTION, Tensor
from nagjax.layers.config import RopeConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.sandwich import Sandwich

GAINS = f"{ATTENTION}.branch.query_gain", f"{ATTENTION}.branch.key_gain"


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    context = int(config.get("max_position_embeddings") or 131072)
    ropes = _ropes(config)
    if "rope_type" not in ropes[SLIDING] and "type" not in ropes[SLIDING]:
        ropes[SLIDING] = ropes[SLIDING] | {"rope_type": "default"}
    (local, rope), (base, whole) = (_read_rope(ropes[kind], context) for kind in (SLIDING, FULL))
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    blocks = read_kinds(config, context, every, rotary="own", rope_base=base, rope=whole)
    more = {"qk_norm": True}
    caps = {"attn": None, "final": None}
    return read_common(config, context, local, caps, more, rope=rope, qk_gain="head", **blocks), Sandwich()


def _ropes(config: dict) -> dict[str, dict]:
    """Of blocks with and without a window, of old and new files."""
    given = config.get("rope_parameters") or {}
    if given and not {SLIDING, FULL} <= {*given}:
        raise UserError("config.json: rope_parameters", sorted(given), f"must have {SLIDING} and {FULL}")
    if given:
        return {kind: dict(given[kind]) for kind in (SLIDING, FULL)}
    whole = {"rope_theta": config.get("rope_theta", 1e6)} | (config.get("rope_scaling") or {})
    return {SLIDING: {"rope_theta": config.get("rope_local_base_freq", 1e4)}, FULL: whole}


def _read_rope(given: dict, context: int) -> tuple[float, RopeConfig]:
    return float(given["rope_theta"]), read_scaling(given, context)


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    scales = dict(zip(GAINS, (query_scale(model, config), 1.0), strict=True))

    def less_one(tensor: Tensor) -> Tensor:
        scale = scales.get(tensor.parts[0])
        return tensor if scale is None else tensor._replace(scale=scale, offset=scale)

    return [*norms(NORMS, model), *map(less_one, scaled_embedding(model))]


def write(model: ModelConfig, scheme: Scheme) -> dict:
    common = write_sandwich(model, scheme)
    block, others = model.block, model.block.others
    refuse("qk_norm", model.qk_norm, (True,), "queries and keys are normalised")
    refuse("block.qk_gain", block.qk_gain, ("head",), "queries and keys are normalised head by head, with gains")
    refuse("block.qk_epsilon", block.qk_epsilon, (1e-6,), "one epsilon is for all norms")
    refuse("block.others.rotary", others.rotary, ("same", "own"), "all blocks have rotary")
    own = (others.rope_base, others.rope) if others.rotary == "own" else (model.rope_base, block.rope)
    ropes = {SLIDING: (model.rope_base, block.rope), FULL: own}
    if block.window is None and not others.places:
        ropes[FULL] = ropes[SLIDING]
    elif block.window is None:
        common["layer_types"] = [FULL if place in others.places else SLIDING for place in model.places]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **common,
        "rope_parameters": {
            kind: {"rope_theta": base} | (write_scaling(rope) or {"rope_type": "default"})
            for kind, (base, rope) in ropes.items()
        },
    }


FAMILY = Family(("gemma3_text",), read, tensors, write, options=OPTIONS)
