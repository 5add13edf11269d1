"""Gemma 3: Gemma 2 with normalised queries and keys. Five blocks of six have a window; the sixth has its own rotary
settings. Of a model that also reads images, only its complete language model is read."""

import numpy as np

from nagjax.errors import UserError
from nagjax.interop.families import Family
from nagjax.interop.families.common import (
    FULL,
    LONGEST,
    SLIDING,
    need,
    read_scaling,
    refuse,
    rope_settings,
    write_scaling,
)
from nagjax.interop.families.gemma import norms, scaled_embedding
from nagjax.interop.families.gemma2 import NORMS, query_scale, read_common, read_kinds, write_sandwich
from nagjax.interop.tensors import ATTENTION, Tensor
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.sandwich import Sandwich

# For fields that a config.json leaves out, as those of models that read images do.
DEFAULTS = dict(vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256)
OF_IMAGES = ("vision_tower.", "multi_modal_projector.")
GAINS = f"{ATTENTION}.branch.query_gain", f"{ATTENTION}.branch.key_gain"


def of_text(config: dict) -> dict:
    if config["model_type"] != "gemma3":
        return config
    (text,) = need(config, "text_config")
    return DEFAULTS | text | {"tie_word_embeddings": config.get("tie_word_embeddings", True)}


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    config = of_text(config)
    context = int(config.get("max_position_embeddings") or 131072)
    ropes, longest = _ropes(config), config.get(LONGEST) or context
    local, base = (float(ropes[kind]["rope_theta"]) for kind in (SLIDING, FULL))
    rope, whole = (read_scaling(ropes[kind], context, longest) for kind in (SLIDING, FULL))
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    blocks = read_kinds(config, context, every, rotary="own", rope_base=base, rope=whole)
    more = {"qk_norm": True}
    caps = {"final": None}  # transformers reads attention's soft cap but does not use it
    return read_common(config, context, local, caps, more, rope=rope, qk_gain="head", **blocks), Sandwich()


def _ropes(config: dict) -> dict[str, dict]:
    """Rotary settings of blocks with and without a window, from files of old and new versions."""
    told, given = rope_settings(config), config.get("rope_parameters") or {}
    if given and not {SLIDING, FULL} <= {*given}:
        raise UserError("config.json: rope_parameters", sorted(given), f"must have {SLIDING} and {FULL}")
    if given:
        return given
    whole = {"rope_theta": config.get("rope_theta", 1e6)} | told
    return {SLIDING: {"rope_theta": config.get("rope_local_base_freq", 1e4)}, FULL: whole}


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    scales = dict(zip(GAINS, (query_scale(model, of_text(config)), 1.0), strict=True))

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


def prepare(files: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Drops the tensors of the image encoder, and renames the others as in a text-only model."""
    found = {}
    for name, value in files.items():
        if not name.removeprefix("model.").startswith(OF_IMAGES):
            rest = name.removeprefix("language_model.")
            found[rest.replace("model.language_model.", "model.", 1)] = value
    return found


OPTIONS = ("logit_softcap", "block.others.places")  # those of gemma2 without attention's soft cap, which nothing reads
FAMILY = Family(("gemma3", "gemma3_text"), read, tensors, write, prepare=prepare, options=OPTIONS)
