"""Llama 2 and 3, SmolLM, Mistral, Qwen2, Qwen3: RMSNorm before gated branches, rotary positions."""

from nagjax.interop.families import Family, Inexpressible
from nagjax.interop.families.common import (
    number,
    only,
    own_head_width,
    read_sizes,
    read_whole_rope,
    read_windows,
    refuse,
    write_rope,
    write_sizes,
    write_windows,
)
from nagjax.interop.tensors import ATTENTION, MLP, Tensor, same, transposed
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.plain import Plain

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
CONTEXT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}  # the defaults


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    kind = config["model_type"]
    mistral = kind == "mistral"
    only(config, "hidden_act", ("silu", "swish"), "silu")
    biases = ("qkv",) if kind == "qwen2" else ("qkv", "out") if config.get("attention_bias") else ()
    biases += ("mlp",) if config.get("mlp_bias") else ()
    epsilon = number(config, "rms_norm_eps", 1e-6)
    sizes = read_sizes(config, CONTEXT[kind], kv_heads=8 if mistral else None)
    base, rope = read_whole_rope(config, sizes["context"])
    head_width = config.get("head_dim") or (128 if kind == "qwen3" else None)
    model = ModelConfig(
        **sizes,
        rope_base=base,
        qk_norm=kind == "qwen3",
        block=BlockConfig(
            head_width=own_head_width(sizes, head_width),
            biases=biases,
            qk_gain="head" if kind == "qwen3" else "none",
            qk_epsilon=epsilon if kind == "qwen3" else 1e-6,
            rope=rope,
            **_windows(config, sizes),
        ),
    )
    return model, Plain(epsilon=epsilon)


def _windows(config: dict, sizes: dict) -> dict:
    kind = config["model_type"]
    if kind == "llama":
        return {}
    own = sizes["depth"], sizes["context"]
    if kind == "mistral":
        return read_windows(config, *own)
    return read_windows(config, *own, config.get("max_window_layers", 28)) if config.get("use_sliding_window") else {}


def attention_tensors(model: ModelConfig) -> list[Tensor]:
    """The projections, biases and gains of attention, under the names common to all families with separate
    projections."""
    block, own, path = model.block, "model.layers.{}.self_attn", f"{ATTENTION}.branch"
    names = {"q": "query", "k": "key", "v": "value", "o": "out"}
    found = [transposed(f"{own}.{short}_proj.weight", f"{path}.{name}") for short, name in names.items()]
    biased = ("qkv" if "qkv" in block.biases else "") + ("o" if "out" in block.biases else "")
    found += [same(f"{own}.{short}_proj.bias", f"{path}.{names[short]}_bias") for short in biased]
    if block.qk_gain != "none":
        found += [same(f"{own}.{short}_norm.weight", f"{path}.{names[short]}_gain") for short in "qk"]
    return found


def other_tensors(model: ModelConfig) -> list[Tensor]:
    """The gated MLP, the embedding and the head."""
    own, path = "model.layers.{}.mlp", f"{MLP}.branch"
    found = [transposed(f"{own}.{name}_proj.weight", f"{path}.{name}") for name in ("gate", "up", "down")]
    if "mlp" in model.block.biases:
        found += [same(f"{own}.{name}_proj.bias", f"{path}.{name}_bias") for name in ("gate", "up", "down")]
    return found + embedding_tensors(model)


def embedding_tensors(model: ModelConfig) -> list[Tensor]:
    """The embedding and the head."""
    found = [same("model.embed_tokens.weight", "embedding.tokens")]
    return found if model.tied else [*found, same("lm_head.weight", "head.tokens")]


NORMS = {
    "model.layers.{}.input_layernorm": f"{ATTENTION}.entry",
    "model.layers.{}.post_attention_layernorm": f"{MLP}.entry",
    "model.norm": "entry",
}


def rms_norms() -> list[Tensor]:
    return [same(f"{name}.weight", f"{path}.gain") for name, path in NORMS.items()]


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    return rms_norms() + attention_tensors(model) + other_tensors(model)


def write_common(model: ModelConfig, epsilon: float) -> dict:
    """The fields that all families with gated branches and rotary positions share."""
    refuse("mlp", model.mlp, ("swiglu",), "its MLP is gated")
    refuse("positions", model.positions, ("rotary",), "its positions are rotary")
    return {
        **write_sizes(model),
        "hidden_act": "silu",
        "rms_norm_eps": epsilon,
        **write_rope(model),
    }


def write(model: ModelConfig, scheme: Scheme) -> dict:
    refuse("scheme", scheme.name, ("plain",), "its residual is plain pre-norm")
    block, biases = model.block, set(model.block.biases)
    common = write_common(model, scheme.epsilon)
    refuse("block.rotated", block.rotated, (1.0,), "rotary turns all features of a head")
    if model.width % model.heads:
        raise Inexpressible("heads", model.heads, f"they must divide the width of {model.width}")
    if model.qk_norm:
        kind, fields = "qwen3", {"head_dim": model.head_width, "attention_bias": "qkv" in biases}
        refuse("block.qk_gain", block.qk_gain, ("none", "head"), "queries and keys are normalised head by head")
        refuse("block.qk_epsilon", block.qk_epsilon, (scheme.epsilon,), "one epsilon is for all norms, scheme.epsilon")
    elif biases == {"qkv"}:
        kind, fields = "qwen2", {}
        refuse("block.head_width", block.head_width, (None,), "with biases on queries, keys and values alone")
    elif block.window is not None:
        kind, fields = "mistral", {"head_dim": model.head_width}
    else:
        kind = "llama"
        fields = {"head_dim": model.head_width, "attention_bias": "qkv" in biases, "mlp_bias": "mlp" in biases}
    if kind != "qwen2" and ("qkv" in biases) != ("out" in biases):
        raise Inexpressible("block.biases", block.biases, "qkv and out go together")
    if kind != "llama" and "mlp" in biases or kind == "mistral" and biases:
        raise Inexpressible("block.biases", block.biases, f"{kind} has no place for them")
    window = write_windows(model)
    if kind.startswith("qwen") and block.window is not None:
        window |= {"use_sliding_window": True, "max_window_layers": 0}
    elif block.others.places:
        raise Inexpressible("block.others.places", block.others.places, f"in {kind} all blocks are alike")
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **common,
        **fields,
        **(window if kind != "llama" else {}),
    }


FAMILY = Family(tuple(ARCHITECTURES), read, tensors, write, options=("block.others.places",))
