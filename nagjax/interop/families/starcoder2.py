"""StarCoder2: LayerNorm, rotary positions, an ungated GELU MLP, biases in all linear maps or in none."""

from nagjax.interop.families import Family
from nagjax.interop.families.common import (
    number,
    only,
    read_sizes,
    read_whole_rope,
    read_window,
    refuse,
    write_rope,
    write_sizes,
)
from nagjax.interop.families.gpt2 import ACTIVATIONS, BIASES
from nagjax.interop.families.llama import NORMS, attention_tensors, embedding_tensors
from nagjax.interop.tensors import MLP, Tensor, layer_norms, same, transposed
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.layer_norm import LayerNorm


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    activation = only(config, "hidden_act", tuple(ACTIVATIONS), "gelu_pytorch_tanh")
    only(config, "mlp_type", ("default",), "default")
    only(config, "norm_type", ("layer_norm",), "layer_norm")
    sizes = read_sizes(config, 4096, tied=True, kv_heads=2)
    base, rope = read_whole_rope(config, sizes["context"])
    model = ModelConfig(
        **sizes,
        mlp=ACTIVATIONS[activation],
        rope_base=base,
        qk_norm=False,
        block=BlockConfig(
            biases=BIASES if config.get("use_bias", True) else (),
            rope=rope,
            **read_window(config, sizes["context"]),
        ),
    )
    return model, LayerNorm(epsilon=number(config, "norm_epsilon", 1e-5))


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    names = {"c_fc": "up", "c_proj": "down"}
    own, path = "model.layers.{}.mlp", f"{MLP}.branch"
    found = [transposed(f"{own}.{name}.weight", f"{path}.{part}") for name, part in names.items()]
    if model.block.biases:
        found += [same(f"{own}.{name}.bias", f"{path}.{part}_bias") for name, part in names.items()]
    return found + layer_norms(NORMS) + attention_tensors(model) + embedding_tensors(model)


def write(model: ModelConfig, scheme: Scheme) -> dict:
    refuse("scheme", scheme.name, ("layer_norm",), "its residual is pre-norm by LayerNorm")
    refuse("mlp", model.mlp, ("gelu", "gelu_exact"), "its MLP has one GELU")
    refuse("positions", model.positions, ("rotary",), "its positions are rotary")
    refuse("qk_norm", model.qk_norm, (False,), "queries and keys are not normalised")
    refuse("block.head_width", model.block.head_width, (None,), "heads share the width")
    refuse("block.rotated", model.block.rotated, (1.0,), "rotary turns all features of a head")
    refuse("block.biases", set(model.block.biases), (set(), set(BIASES)), "all linear maps have a bias, or none")
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        **write_sizes(model),
        "hidden_act": "gelu" if model.mlp == "gelu_exact" else "gelu_pytorch_tanh",
        "norm_epsilon": scheme.epsilon,
        "use_bias": bool(model.block.biases),
        "sliding_window": model.block.window,
        **write_rope(model),
    }


FAMILY = Family(("starcoder2",), read, tensors, write)
