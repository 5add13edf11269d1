"""SmolLM3: Llama in which some blocks have no rotary, every fourth unless the config.json says otherwise."""

import dataclasses

from nagjax.errors import UserError
from nagjax.interop.families import Family, llama
from nagjax.interop.families.common import FULL, SLIDING, full_blocks, layer_types, read_depth, refuse
from nagjax.layers.config import OtherBlocks
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme

DEFAULTS = dict(rms_norm_eps=1e-6, max_position_embeddings=32768, num_key_value_heads=4, tie_word_embeddings=True)


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    depth = read_depth(config)
    config = DEFAULTS | {"rope_theta": 2e6} | config
    model, scheme = llama.read(config | {"model_type": "llama"})
    every = config.get("no_rope_layer_interval", 4)
    rotary = config.get("no_rope_layers") or [(i + 1) % every for i in range(depth)]
    if len(rotary) != depth:
        raise UserError("config.json: no_rope_layers", rotary, f"must have one entry for each of the {depth} blocks")
    places = tuple(i for i, turned in enumerate(rotary) if not turned)
    windows = _windows(config, depth, model.context, places)
    others = OtherBlocks(places, windows[False], "none") if places else OtherBlocks()
    block = dataclasses.replace(model.block, window=windows[True], others=others)
    return dataclasses.replace(model, block=block), scheme


def _windows(config: dict, depth: int, context: int, places: tuple[int, ...]) -> dict[bool, int | None]:
    """The window of the blocks with rotary, and of those without."""
    window, found = config.get("sliding_window"), {True: None, False: None}
    if not config.get("use_sliding_window", False) or window is None or window >= context:
        return found
    kinds = config.get("layer_types") or [SLIDING if i in places else FULL for i in range(depth)]
    full = {*full_blocks(kinds, depth)}
    for turned, own in ((False, {*places}), (True, {*range(depth)} - {*places})):
        if own & full and own - full:
            fix = "must be the same in all blocks with rotary, and in all blocks without"
            raise UserError("config.json: layer_types", config.get("layer_types"), fix)
        found[turned] = None if own & full else int(window)
    return found


def write(model: ModelConfig, scheme: Scheme) -> dict:
    refuse("scheme", scheme.name, ("plain",), "its residual is plain pre-norm")
    common = llama.write_common(model, scheme.epsilon)
    block, others = model.block, model.block.others
    refuse("block.others.rotary", others.rotary, ("none",), "the other blocks have no rotary")
    window = block.window or others.window
    refuse("block.others.window", others.window, (None, window), "there is one window")
    refuse("qk_norm", model.qk_norm, (False,), "queries and keys are not normalised")
    refuse("block.biases", set(block.biases) - {"mlp"}, (set(), {"qkv", "out"}), "qkv and out go together")
    refuse("block.rotated", block.rotated, (1.0,), "rotary turns all features of a head")
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        **common,
        "head_dim": model.head_width,
        "attention_bias": "qkv" in block.biases,
        "mlp_bias": "mlp" in block.biases,
        "no_rope_layers": [int(place not in others.places) for place in model.places],
        "layer_types": layer_types(model),
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


FAMILY = Family(("smollm3",), read, llama.tensors, write, options=("block.others.places",))
