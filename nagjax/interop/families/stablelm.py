"""StableLM: LayerNorm before gated branches, in sequence or in parallel, rotary on a part of each head."""

from nagjax.interop.families import Family
from nagjax.interop.families.common import number, only, read_rope, read_sizes, refuse
from nagjax.interop.families.gptj import one_norm
from nagjax.interop.families.llama import NORMS, attention_tensors, other_tensors, write_common
from nagjax.interop.tensors import Tensor, layer_norms
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.layer_norm import LayerNorm
from nagjax.residual.schemes.parallel import Parallel


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    only(config, "hidden_act", ("silu", "swish"), "silu")
    only(config, "qk_layernorm", (False,), False)
    sizes = read_sizes(config, 4096, kv_heads=32)
    base, rope, share = read_rope(config, sizes["context"])
    model = ModelConfig(
        **sizes,
        rope_base=base,
        qk_norm=False,
        block=BlockConfig(
            biases=("qkv",) if config.get("use_qkv_bias") else (),
            rotated=0.25 if share is None else share,
            rope=rope,
        ),
    )
    scheme = Parallel if config.get("use_parallel_residual") else LayerNorm
    return model, scheme(epsilon=number(config, "layer_norm_eps", 1e-5))


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    norms = (
        one_norm("model.layers.{}.input_layernorm", "model.norm")
        if config.get("use_parallel_residual")
        else layer_norms(NORMS)
    )
    return norms + attention_tensors(model) + other_tensors(model)


def write(model: ModelConfig, scheme: Scheme) -> dict:
    refuse("scheme", scheme.name, ("layer_norm",), "its residual is pre-norm by LayerNorm")
    common = write_common(model, scheme.epsilon)
    refuse("qk_norm", model.qk_norm, (False,), "queries and keys are not normalised")
    refuse("block.head_width", model.block.head_width, (None,), "heads share the width")
    refuse("block.window", model.block.window, (None,), "attention sees all tokens before")
    refuse("block.biases", model.block.biases, ((), ("qkv",)), "only queries, keys and values may have them")
    return {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "layer_norm_eps": common.pop("rms_norm_eps"),
        **common,
        "use_qkv_bias": bool(model.block.biases),
        "use_parallel_residual": False,
        "partial_rotary_factor": model.block.rotated,
    }


FAMILY = Family(("stablelm",), read, tensors, write)
