"""Phi-3: Llama with queries, keys and values in one matrix, gate and up in another; some models rotate only a part of
each head."""

from nagjax.interop.families import Family, Inexpressible
from nagjax.interop.families.common import number, only, read_rope, read_sizes, read_window, refuse
from nagjax.interop.families.llama import embedding_tensors, rms_norms, write_common
from nagjax.interop.tensors import ATTENTION, MLP, QKV, Tensor, stacked_rows, transposed
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.plain import Plain


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    only(config, "hidden_act", ("silu", "swish"), "silu")
    sizes = read_sizes(config, 4096)
    base, rope, share = read_rope(_with_original(config), sizes["context"])
    model = ModelConfig(
        **sizes,
        rope_base=base,
        qk_norm=False,
        block=BlockConfig(
            rotated=1.0 if share is None else share,
            rope=rope,
            **read_window(config, sizes["context"]),
        ),
    )
    return model, Plain(epsilon=number(config, "rms_norm_eps", 1e-5))


def _with_original(config: dict) -> dict:
    """The config with the original context added to the fields of the rotary scaling, under any of their names."""
    for name in ("rope_parameters", "rope_scaling"):
        if given := config.get(name):
            kind = given.get("rope_type", given.get("type", "default"))
            kind = "longrope" if kind in ("su", "yarn") else kind  # early files have these names for the same scaling
            original = {"original_max_position_embeddings": config.get("original_max_position_embeddings", 4096)}
            config = config | {name: original | given | {"rope_type": kind}}
    return config


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    layer, wide, narrow = (
        "model.layers.{}",
        *((model.heads or 0) * model.head_width, (model.kv_heads or 0) * model.head_width),
    )
    opened = tuple(f"{MLP}.branch.{name}" for name in ("gate", "up"))
    return [
        *rms_norms(),
        *embedding_tensors(model),
        stacked_rows(f"{layer}.self_attn.qkv_proj.weight", QKV, (wide, narrow, narrow)),
        transposed(f"{layer}.self_attn.o_proj.weight", f"{ATTENTION}.branch.out"),
        stacked_rows(f"{layer}.mlp.gate_up_proj.weight", opened, (model.hidden or 0,) * 2),
        transposed(f"{layer}.mlp.down_proj.weight", f"{MLP}.branch.down"),
    ]


def write(model: ModelConfig, scheme: Scheme) -> dict:
    refuse("scheme", scheme.name, ("plain",), "its residual is plain pre-norm")
    common = write_common(model, scheme.epsilon)
    refuse("block.rope.scaling", model.block.rope.scaling, ("none",), "its rotary is scaled by longrope alone")
    refuse("qk_norm", model.qk_norm, (False,), "queries and keys are not normalised")
    refuse("block.head_width", model.block.head_width, (None,), "heads share the width")
    if model.block.biases:
        raise Inexpressible("block.biases", model.block.biases, "no linear map has one")
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **common,
        "partial_rotary_factor": model.block.rotated,
        "sliding_window": model.block.window,
        "original_max_position_embeddings": model.context,
    }


FAMILY = Family(("phi3",), read, tensors, write)
