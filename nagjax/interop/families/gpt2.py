"""GPT-2: LayerNorm, learned positions, biases everywhere, one matrix for queries, keys and values."""

import numpy as np

from nagjax.interop.families import Family, Inexpressible
from nagjax.interop.families.common import need, number, only, refuse
from nagjax.interop.tensors import ATTENTION, MLP, QKV, QKV_BIAS, Tensor, layer_norms, same
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.layer_norm import LayerNorm

BIASES = ("qkv", "out", "mlp")
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}


def read_sizes(config: dict) -> dict:
    """The sizes of a ModelConfig, from GPT-2's field names."""
    depth, width, heads, context, vocab = need(config, "n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
    hidden = config.get("n_inner") or 4 * width
    return {"depth": depth, "width": width, "heads": heads, "hidden": hidden, "context": context, "vocab": vocab}


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    sizes = read_sizes(config)
    activation = only(config, "activation_function", tuple(ACTIVATIONS), "gelu_new")
    only(config, "scale_attn_weights", (True,), True)
    only(config, "scale_attn_by_inverse_layer_idx", (False,), False)
    only(config, "add_cross_attention", (False,), False)
    model = ModelConfig(
        **sizes,
        mlp=ACTIVATIONS[activation],
        positions="learned",
        qk_norm=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        block=BlockConfig(biases=BIASES),
    )
    return model, LayerNorm(epsilon=number(config, "layer_norm_epsilon", 1e-5))


def _thirds(x: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(np.split(x, 3, axis=-1))


def _joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts, axis=-1)


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    h = "transformer.h.{}"
    found = [
        same("transformer.wte.weight", "embedding.tokens"),
        same("transformer.wpe.weight", "embedding.positions"),
        Tensor(f"{h}.attn.c_attn.weight", QKV, _thirds, _joined),  # [in, out], as in nagjax
        Tensor(f"{h}.attn.c_attn.bias", QKV_BIAS, _thirds, _joined),
        same(f"{h}.attn.c_proj.weight", f"{ATTENTION}.branch.out"),
        same(f"{h}.attn.c_proj.bias", f"{ATTENTION}.branch.out_bias"),
        same(f"{h}.mlp.c_fc.weight", f"{MLP}.branch.up"),
        same(f"{h}.mlp.c_fc.bias", f"{MLP}.branch.up_bias"),
        same(f"{h}.mlp.c_proj.weight", f"{MLP}.branch.down"),
        same(f"{h}.mlp.c_proj.bias", f"{MLP}.branch.down_bias"),
    ]
    norms = {f"{h}.ln_1": f"{ATTENTION}.entry", f"{h}.ln_2": f"{MLP}.entry", "transformer.ln_f": "entry"}
    found += layer_norms(norms)
    return found if model.tied else [*found, same("lm_head.weight", "head.tokens")]


def check_blocks(model: ModelConfig, activations: tuple[str, ...]) -> None:
    """Raises Inexpressible for the settings that GPT-2, GPT-NeoX, OPT and BERT all lack."""
    refuse("mlp", model.mlp, activations, f"its MLP is {' or '.join(activations)}")
    refuse("qk_norm", model.qk_norm, (False,), "queries and keys are not normalised")
    refuse("kv_heads", model.kv_heads, (model.heads,), "every head has keys of its own")
    refuse("block.head_width", model.block.head_width, (None,), "heads share the width")
    refuse("block.window", model.block.window, (None,), "attention sees all tokens before")


def write(model: ModelConfig, scheme: Scheme) -> dict:
    refuse("scheme", scheme.name, ("layer_norm",), "its residual is pre-norm by LayerNorm")
    refuse("positions", model.positions, ("learned",), "its positions are learned")
    check_blocks(model, ("gelu", "gelu_exact"))
    if set(model.block.biases) != set(BIASES):
        raise Inexpressible("block.biases", model.block.biases, f"it has all of {', '.join(BIASES)}")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab,
        "n_positions": model.context,
        "n_embd": model.width,
        "n_layer": model.depth,
        "n_head": model.heads,
        "n_inner": model.hidden,
        "activation_function": "gelu_new" if model.mlp == "gelu" else "gelu",
        "layer_norm_epsilon": scheme.epsilon,
        "tie_word_embeddings": model.tied,
    }


FAMILY = Family(("gpt2",), read, tensors, write, prefix="transformer.")
