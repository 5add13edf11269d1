"""OLMo 2: norms at the end of every branch, and on queries and keys over all heads together."""

from nagjax.interop.families import Family
from nagjax.interop.families.common import number, only, own_head_width, read_sizes, read_whole_rope, refuse
from nagjax.interop.families.llama import attention_tensors, other_tensors, write_common
from nagjax.interop.tensors import ATTENTION, MLP, Tensor, same
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.reordered import Reordered


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    only(config, "hidden_act", ("silu", "swish"), "silu")
    epsilon = number(config, "rms_norm_eps", 1e-5)
    sizes = read_sizes(config, 2048)
    base, rope = read_whole_rope(config, sizes["context"])
    block = BlockConfig(
        head_width=own_head_width(sizes, config.get("head_dim")),
        biases=("qkv", "out") if config.get("attention_bias") else (),
        qk_gain="row",
        qk_epsilon=epsilon,
        rope=rope,
    )
    return ModelConfig(**sizes, rope_base=base, block=block), Reordered(epsilon=epsilon)


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    norms = [
        same("model.layers.{}.post_attention_layernorm.weight", f"{ATTENTION}.gate.gain"),
        same("model.layers.{}.post_feedforward_layernorm.weight", f"{MLP}.gate.gain"),
        same("model.norm.weight", "ends.gain"),
    ]
    return norms + attention_tensors(model) + other_tensors(model)


def write(model: ModelConfig, scheme: Scheme) -> dict:
    refuse("scheme", scheme.name, ("reordered",), "its norms are on the branches' outputs")
    block = model.block
    refuse("qk_norm", model.qk_norm, (True,), "queries and keys are normalised")
    refuse("block.qk_gain", block.qk_gain, ("row",), "queries and keys are normalised over all heads")
    refuse("block.qk_epsilon", block.qk_epsilon, (scheme.epsilon,), "one epsilon is for all norms, scheme.epsilon")
    refuse("block.rotated", block.rotated, (1.0,), "rotary turns all features of a head")
    refuse("block.window", block.window, (None,), "attention sees all tokens before")
    refuse("block.head_width", block.head_width, (None,), "heads share the width")
    refuse("block.biases", set(block.biases), (set(), {"qkv", "out"}), "qkv and out go together, the MLP has none")
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        **write_common(model, scheme.epsilon),
        "attention_bias": "qkv" in block.biases,
    }


FAMILY = Family(("olmo2",), read, tensors, write)
