"""OLMo 1: LayerNorm without gain and bias. Import only: exported, the result is a StableLM."""

from nagjax.interop.families import Family, read_only
from nagjax.interop.families.common import only, read_sizes, read_whole_rope
from nagjax.interop.families.llama import NORMS, attention_tensors, other_tensors
from nagjax.interop.tensors import Tensor, constant
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.layer_norm import LayerNorm


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    only(config, "hidden_act", ("silu", "swish"), "silu")
    only(config, "clip_qkv", (None,), None)
    sizes = read_sizes(config, 2048)
    base, rope = read_whole_rope(config, sizes["context"])
    model = ModelConfig(
        **sizes,
        rope_base=base,
        qk_norm=False,
        block=BlockConfig(biases=("qkv", "out") if config.get("attention_bias") else (), rope=rope),
    )
    return model, LayerNorm(epsilon=1e-5)


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    norms = [
        constant(f"{path}.{part}", value) for path in NORMS.values() for part, value in (("gain", 1.0), ("bias", 0.0))
    ]
    return norms + attention_tensors(model) + other_tensors(model)


FAMILY = Family(("olmo",), read, tensors, read_only)
