"""Gemma 1: Llama with GELU gates, gains stored minus 1, and an embedding scaled by the square root of the width.

The scale is folded into the table. If the head uses the same table, the last norm's gain is divided by it.
"""

from nagjax.interop.families import Family
from nagjax.interop.families.common import (
    number,
    only,
    own_head_width,
    read_sizes,
    read_whole_rope,
    refuse,
    write_rope,
    write_sizes,
)
from nagjax.interop.families.llama import NORMS, attention_tensors, other_tensors
from nagjax.interop.tensors import Tensor, same
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.plain import Plain

ACTIVATION = ("gelu_pytorch_tanh", "gelu_new")
ONCE = ("gelu", *ACTIVATION)  # for Gemma 1, whose first files say gelu although they mean its tanh approximation


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    only(config, "hidden_act", ONCE, "gelu_pytorch_tanh")
    only(config, "hidden_activation", (None, *ACTIVATION), None)
    context = int(config.get("max_position_embeddings") or 8192)
    base, rope = read_whole_rope(config, context)
    return read_model(config, context, base, rope=rope), Plain(epsilon=number(config, "rms_norm_eps", 1e-6))


def read_model(config: dict, context: int, base: float, more: dict | None = None, **block) -> ModelConfig:
    """The part of the model that all generations share; `more` are further fields of the model, `block` of its
    blocks."""
    only(config, "use_bidirectional_attention", (None, False), None)
    sizes = read_sizes(config, context, tied=True)
    return ModelConfig(
        **sizes,
        mlp="geglu",
        rope_base=base,
        block=BlockConfig(
            head_width=own_head_width(sizes, config.get("head_dim") or 256),
            biases=("qkv", "out") if config.get("attention_bias") else (),
            **block,
        ),
        **{"qk_norm": False} | (more or {}),
    )


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    return [*norms(NORMS, model), *scaled_embedding(model)]


def norms(names: dict[str, str], model: ModelConfig) -> list[Tensor]:
    """The tensors of the gains, which files store minus 1."""
    last = model.width**-0.5 if model.tied else 1.0
    scales = {path: last if path == "entry" else 1.0 for path in names.values()}
    return [
        same(f"{name}.weight", f"{path}.gain")._replace(scale=scales[path], offset=scales[path])
        for name, path in names.items()
    ]


def scaled_embedding(model: ModelConfig) -> list[Tensor]:
    """All tensors except the norms."""
    return [
        tensor._replace(scale=model.width**0.5) if tensor.parts == ("embedding.tokens",) else tensor
        for tensor in attention_tensors(model) + other_tensors(model)
    ]


def write_common(model: ModelConfig, epsilon: float) -> dict:
    """The fields that all generations share."""
    refuse("mlp", model.mlp, ("geglu",), "its MLP is gated by GELU")
    refuse("positions", model.positions, ("rotary",), "its positions are rotary")
    refuse("block.rotated", model.block.rotated, (1.0,), "rotary turns all features of a head")
    refuse("block.biases", set(model.block.biases), (set(), {"qkv", "out"}), "qkv and out go together")
    return {
        **write_sizes(model),
        "head_dim": model.head_width,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": epsilon,
        "attention_bias": bool(model.block.biases),
    }


def write(model: ModelConfig, scheme: Scheme) -> dict:
    refuse("scheme", scheme.name, ("plain",), "its residual is plain pre-norm")
    common = write_common(model, scheme.epsilon)
    refuse("qk_norm", model.qk_norm, (False,), "queries and keys are not normalised")
    refuse("block.window", model.block.window, (None,), "attention sees all tokens before")
    return {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", **common, **write_rope(model)}


FAMILY = Family(("gemma",), read, tensors, write)
