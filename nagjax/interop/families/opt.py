"""OPT: LayerNorm, learned positions after two unused rows, ReLU, biases everywhere."""

from nagjax.interop.families import Family
from nagjax.interop.families.common import learned_positions, need, only, refuse
from nagjax.interop.families.gpt2 import BIASES, check_blocks
from nagjax.interop.tensors import ATTENTION, MLP, Tensor, biased, later_rows, layer_norms, same
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.layer_norm import LayerNorm

UNUSED = 2  # rows in front of the first token's in the table of positions


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    depth, width, heads, hidden, vocab = need(
        config, "num_hidden_layers", "hidden_size", "num_attention_heads", "ffn_dim", "vocab_size"
    )
    only(config, "activation_function", ("relu",), "relu")
    only(config, "do_layer_norm_before", (True,), True)
    only(config, "_remove_final_layer_norm", (False,), False)
    only(config, "enable_bias", (True,), True)
    only(config, "layer_norm_elementwise_affine", (True,), True)
    only(config, "word_embed_proj_dim", (None, width), None)
    model = ModelConfig(
        depth=depth,
        width=width,
        heads=heads,
        hidden=hidden,
        context=learned_positions(config, 2048),
        vocab=vocab,
        mlp="relu",
        positions="learned",
        qk_norm=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        block=BlockConfig(biases=BIASES),
    )
    return model, LayerNorm(epsilon=1e-5)


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    layer = "model.decoder.layers.{}"
    maps = {f"self_attn.{name[0]}_proj": f"{ATTENTION}.branch.{name}" for name in ("query", "key", "value")}
    maps |= {"self_attn.out_proj": f"{ATTENTION}.branch.out", "fc1": f"{MLP}.branch.up", "fc2": f"{MLP}.branch.down"}
    norms = {
        f"{layer}.self_attn_layer_norm": f"{ATTENTION}.entry",
        f"{layer}.final_layer_norm": f"{MLP}.entry",
        "model.decoder.final_layer_norm": "entry",
    }
    found = [
        same("model.decoder.embed_tokens.weight", "embedding.tokens"),
        later_rows("model.decoder.embed_positions.weight", "embedding.positions", UNUSED),
    ]
    found += biased({f"{layer}.{name}": path for name, path in maps.items()}) + layer_norms(norms)
    return found if model.tied else [*found, same("lm_head.weight", "head.tokens")]


def write(model: ModelConfig, scheme: Scheme) -> dict:
    refuse("scheme", scheme.name, ("layer_norm",), "its residual is pre-norm by LayerNorm")
    refuse("positions", model.positions, ("learned",), "its positions are learned")
    check_blocks(model, ("relu",))
    refuse("scheme.epsilon", scheme.epsilon, (1e-5,), "PyTorch's own epsilon is fixed")
    refuse("block.biases", set(model.block.biases), (set(BIASES),), f"it has all of {', '.join(BIASES)}")
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "word_embed_proj_dim": model.width,
        "ffn_dim": model.hidden,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "activation_function": "relu",
        "max_position_embeddings": model.context,
        "do_layer_norm_before": True,
        "tie_word_embeddings": model.tied,
    }


FAMILY = Family(("opt",), read, tensors, write)
