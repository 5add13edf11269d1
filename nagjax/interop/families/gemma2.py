"""Gemma 2: Gemma with norms before and after every branch, soft caps on logits, and a window in every other block."""

from nagjax.interop.families import Family
from nagjax.interop.families.common import (
    FULL,
    SLIDING,
    full_blocks,
    layer_types,
    number,
    only,
    read_depth,
    read_whole_rope,
    refuse,
    write_rope,
)
from nagjax.interop.families.gemma import ACTIVATION, norms, read_model, scaled_embedding, write_common
from nagjax.interop.tensors import ATTENTION, MLP, Tensor
from nagjax.layers.config import OtherBlocks
from nagjax.model.config import ModelConfig
from nagjax.ranges import Positive, check_value
from nagjax.residual import Scheme
from nagjax.residual.schemes.sandwich import Sandwich

NORMS = {
    "model.layers.{}.input_layernorm": f"{ATTENTION}.entry",
    "model.layers.{}.post_attention_layernorm": f"{ATTENTION}.gate",
    "model.layers.{}.pre_feedforward_layernorm": f"{MLP}.entry",
    "model.layers.{}.post_feedforward_layernorm": f"{MLP}.gate",
    "model.norm": "entry",
}


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    context = int(config.get("max_position_embeddings") or 8192)
    base, rope = read_whole_rope(config, context)
    windows = read_kinds(config, context, 2)
    return read_common(config, context, base, {"attn": 50.0, "final": 30.0}, rope=rope, **windows), Sandwich()


def read_kinds(config: dict, context: int, every: int, **others) -> dict:
    """`window` and `others` of a BlockConfig in which one block of `every` sees all tokens and has the settings
    `others`."""
    depth = read_depth(config)
    kinds = config.get("layer_types") or [SLIDING if (i + 1) % every else FULL for i in range(depth)]
    window, places = config.get("sliding_window", 4096), full_blocks(kinds, depth)
    narrow = window is not None and window < context
    places = places if narrow or others else ()
    return {"window": int(window) if narrow else None, "others": OtherBlocks(places, **others if places else {})}


def read_common(config: dict, context: int, base: float, caps: dict, more: dict | None = None, **block) -> ModelConfig:
    only(config, "hidden_activation", ACTIVATION, "gelu_pytorch_tanh")
    only(config, "rms_norm_eps", (1e-6,), 1e-6)
    check_value("config.json: query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256), Positive)
    own = {name: config.get(f"{name}_logit_softcapping", default) for name, default in caps.items()}
    limit = {"logit_softcap": own["final"]}
    return read_model(config, context, base, limit | (more or {}), softcap=own.get("attn"), **block)


def query_scale(model: ModelConfig, config: dict) -> float:
    """The factor on queries: attention's logits are divided by the root of `query_pre_attn_scalar` in the file's model,
    and here by the root of the head's width."""
    return (model.head_width / number(config, "query_pre_attn_scalar", 256)) ** 0.5


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    queries = {f"{ATTENTION}.branch.query", f"{ATTENTION}.branch.query_bias"}
    scale = query_scale(model, config)
    rest = [
        tensor._replace(scale=scale) if tensor.parts[0] in queries else tensor for tensor in scaled_embedding(model)
    ]
    return [*norms(NORMS, model), *rest]


def write_sandwich(model: ModelConfig, scheme: Scheme) -> dict:
    refuse("scheme", scheme.name, ("sandwich",), "its norms are before and after every branch")
    refuse("block.others.window", model.block.others.window, (None,), "blocks have the one window or see all tokens")
    return write_common(model, 1e-6) | {
        "query_pre_attn_scalar": model.head_width,
        "attn_logit_softcapping": model.block.softcap,
        "final_logit_softcapping": model.logit_softcap,
        "sliding_window": model.block.window or model.context,
        "layer_types": layer_types(model),
    }


def write(model: ModelConfig, scheme: Scheme) -> dict:
    common = write_sandwich(model, scheme)
    refuse("qk_norm", model.qk_norm, (False,), "queries and keys are not normalised")
    refuse("block.others.rotary", model.block.others.rotary, ("same",), "rotary is the same in all blocks")
    return {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **common, **write_rope(model)}


OPTIONS = ("block.softcap", "logit_softcap", "block.others.places")
FAMILY = Family(("gemma2",), read, tensors, write, options=OPTIONS)
