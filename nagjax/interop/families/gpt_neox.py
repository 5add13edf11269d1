"""GPT-NeoX and Pythia: LayerNorm, branches in parallel or in sequence, rotary on a part of each head."""

import functools

import numpy as np

from nagjax.interop.families import Family, Inexpressible
from nagjax.interop.families.common import number, only, read_rope, read_sizes, refuse, write_rope, write_sizes
from nagjax.interop.families.gpt2 import ACTIVATIONS, check_blocks
from nagjax.interop.tensors import ATTENTION, MLP, QKV, QKV_BIAS, Tensor, biased, layer_norms, same, transposed
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.layer_norm import LayerNorm
from nagjax.residual.schemes.parallel import Parallel


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    activation = only(config, "hidden_act", ("gelu", "gelu_new", "gelu_pytorch_tanh"), "gelu")
    sizes = read_sizes(config, 2048)
    base, rope, share = read_rope(config, sizes["context"], config.get("rotary_emb_base", 10_000.0))
    model = ModelConfig(
        **sizes | {"kv_heads": sizes["heads"]},
        mlp=ACTIVATIONS[activation],
        rope_base=base,
        qk_norm=False,
        block=BlockConfig(
            biases=("qkv", "out", "mlp") if config.get("attention_bias", True) else ("mlp",),
            rotated=config.get("rotary_pct", 0.25) if share is None else share,
            rope=rope,
        ),
    )
    scheme = Parallel if config.get("use_parallel_residual", True) else LayerNorm
    return model, scheme(epsilon=number(config, "layer_norm_eps", 1e-5))


def _heads_apart(x: np.ndarray, heads: int) -> tuple[np.ndarray, ...]:
    """Splits [H * 3 * Dh, ...], which holds for each head its query, key and value features, into three of [H * Dh,
    ...]."""
    by_head = x.reshape(heads, 3, -1, *x.shape[1:])
    return tuple(by_head[:, i].reshape(-1, *x.shape[1:]) for i in range(3))


def _heads_together(*parts: np.ndarray, heads: int) -> np.ndarray:
    by_head = [part.reshape(heads, 1, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(by_head, axis=1).reshape(-1, *parts[0].shape[1:])


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    layer, heads = "gpt_neox.layers.{}", model.heads
    join = functools.partial(_heads_together, heads=heads)
    found = [
        same("gpt_neox.embed_in.weight", "embedding.tokens"),
        Tensor(
            f"{layer}.attention.query_key_value.weight",
            QKV,
            lambda x: tuple(part.T for part in _heads_apart(x, heads)),
            lambda *parts: join(*(part.T for part in parts)),
        ),
        transposed(f"{layer}.attention.dense.weight", f"{ATTENTION}.branch.out"),
        *biased({f"{layer}.mlp.dense_h_to_4h": f"{MLP}.branch.up", f"{layer}.mlp.dense_4h_to_h": f"{MLP}.branch.down"}),
    ]
    if "qkv" in model.block.biases:
        name = f"{layer}.attention.query_key_value.bias"
        found.append(Tensor(name, QKV_BIAS, lambda x: _heads_apart(x, heads), join))
        found.append(same(f"{layer}.attention.dense.bias", f"{ATTENTION}.branch.out_bias"))
    norms = {
        f"{layer}.input_layernorm": f"{ATTENTION}.entry",
        f"{layer}.post_attention_layernorm": f"{MLP}.entry",
        "gpt_neox.final_layer_norm": "entry",
    }
    found += layer_norms(norms)
    head = Tensor("embed_out.weight", ("head.tokens",), alias="lm_head.weight")
    return found if model.tied else [*found, head]


def write(model: ModelConfig, scheme: Scheme) -> dict:
    refuse("scheme", scheme.name, ("layer_norm", "parallel"), "its residual is pre-norm by LayerNorm")
    refuse("positions", model.positions, ("rotary",), "its positions are rotary")
    check_blocks(model, ("gelu", "gelu_exact"))
    if "mlp" not in model.block.biases or len(model.block.biases) == 2:
        raise Inexpressible("block.biases", model.block.biases, "the MLP has them, qkv and out go together")
    rope, sizes = write_rope(model), write_sizes(model)
    del sizes["num_key_value_heads"]
    return sizes | {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu" if model.mlp == "gelu_exact" else "gelu_new",
        "layer_norm_eps": scheme.epsilon,
        "use_parallel_residual": scheme.name == "parallel",
        "attention_bias": "qkv" in model.block.biases,
        "rotary_emb_base": rope.pop("rope_theta"),
        "rotary_pct": model.block.rotated,
        **rope,
    }


FAMILY = Family(("gpt_neox",), read, tensors, write, prefix="gpt_neox.")
