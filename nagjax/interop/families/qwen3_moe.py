"""Qwen3-MoE and Mixtral: Qwen3 and Mistral with a Mixture-of-Experts in place of every MLP."""

import dataclasses

from nagjax.errors import UserError
from nagjax.interop.families import Family, Inexpressible, llama
from nagjax.interop.families.common import need, only, read_window, refuse, write_windows
from nagjax.interop.tensors import MLP, Tensor, transposed
from nagjax.layers.config import MoEConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme

ARCHITECTURES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
LIKE = {"mixtral": "mistral", "qwen3_moe": "qwen3"}
# Names of the tensors of a Mixture-of-Experts: the router, and an expert's matrices.
NAMES = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp.gate", "mlp.experts.{}", {name: f"{name}_proj" for name in ("gate", "up", "down")}),
}


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    kind = config["model_type"]
    experts = read_experts(config)
    defaults = {"mixtral": {"rope_theta": 1e6, "rms_norm_eps": 1e-5}, "qwen3_moe": {"num_key_value_heads": 4}}[kind]
    own = {"model_type": LIKE[kind], "sliding_window": None, "intermediate_size": experts.hidden}
    if kind == "qwen3_moe" and not config.get("head_dim"):  # the default of Qwen3 is 128
        width, heads = need(config, "hidden_size", "num_attention_heads")
        own["head_dim"] = width // heads
    model, scheme = llama.read(defaults | config | own)
    window = _window(config, model.context)
    return dataclasses.replace(model, moe=experts, block=dataclasses.replace(model.block, **window)), scheme


def _window(config: dict, context: int) -> dict:
    """The window of all blocks; unlike Qwen3, Qwen3-MoE has no blocks without one."""
    if config["model_type"] == "mixtral":
        return read_window(config, context)
    return read_window(config, context, 4096) if config.get("use_sliding_window", False) else {}


def read_experts(config: dict) -> MoEConfig:
    if config["model_type"] == "mixtral":
        many, active, hidden = need(config, "num_local_experts", "num_experts_per_tok", "intermediate_size")
        return MoEConfig(many, _several(active), hidden=hidden)
    config = {"num_experts": config.get("num_local_experts")} | config  # the name that transformers 5 writes
    many, active, hidden = need(config, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    only(config, "decoder_sparse_step", (1,), 1)
    if config.get("mlp_only_layers"):
        raise UserError(
            "config.json: mlp_only_layers", config["mlp_only_layers"], "blocks with one MLP: cannot be mixed"
        )
    if config.get("norm_topk_prob", False):
        return MoEConfig(many, _several(active), hidden=hidden)
    return MoEConfig(many, active, hidden=hidden, weights="score")


def _several(active: int) -> int:
    if active == 1:
        fix = "cannot be imported: the normalised weight of one expert is always 1, and its router has no gradient"
        raise UserError("config.json: num_experts_per_tok", active, fix)
    return active


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    router, expert, names = NAMES[config["model_type"]]
    layer, path = "model.layers.{}", f"{MLP}.branch"
    found = [transposed(f"{layer}.{router}.weight", f"{path}.router")]
    for part, name in names.items():
        found.append(
            transposed(f"{layer}.{expert}.{name}.weight", f"{path}.{part}")._replace(experts=model.moe.experts)
        )
    return found + llama.rms_norms() + llama.attention_tensors(model) + llama.embedding_tensors(model)


def write(model: ModelConfig, scheme: Scheme) -> dict:
    moe = model.moe
    refuse("scheme", scheme.name, ("plain",), "its residual is plain pre-norm")
    if not moe.experts:
        raise Inexpressible("scheme", scheme.name, "every MLP is of experts")
    values = llama.write(model, scheme)
    refuse("moe.shared", moe.shared, (0,), "no expert is run by all tokens")
    refuse("moe.score", moe.score, ("softmax",), "scores are a softmax")
    refuse("moe.bias_rate", moe.bias_rate, (0.0,), "there are no balancing biases")
    refuse("moe.skips", moe.skips, (0,), "every choice is an expert")
    fields = {"num_experts_per_tok": moe.active, "output_router_logits": False}
    if values["model_type"] == "qwen3":
        kind = "qwen3_moe"
        normalised = moe.weights == "normalised"
        fields |= {"num_experts": moe.experts, "moe_intermediate_size": moe.hidden, "norm_topk_prob": normalised}
        fields |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    else:
        kind = "mixtral"
        refuse("block.biases", model.block.biases, ((),), "no linear map has one")
        refuse("moe.weights", moe.weights, ("normalised",), "the chosen experts' weights sum to 1")
        fields |= {"num_local_experts": moe.experts, "intermediate_size": moe.hidden, **write_windows(model)}
        fields |= {"head_dim": model.head_width}
    return values | fields | {"architectures": [ARCHITECTURES[kind]], "model_type": kind}


FAMILY = Family(tuple(ARCHITECTURES), read, tensors, write, options=("moe.experts",))
