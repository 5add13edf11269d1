"""Granite: Llama with four multipliers, which are folded into the weights. Import only: exported, the result is a
Llama."""

from nagjax.interop.families import Family, llama, read_only
from nagjax.interop.families.common import number
from nagjax.interop.tensors import Tensor
from nagjax.model.config import ModelConfig
from nagjax.ranges import Positive, check_value
from nagjax.residual import Scheme

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    for name in MULTIPLIERS:
        check_value(f"config.json: {name}", config.get(name, 1.0), Positive)
    return llama.read({"rms_norm_eps": 1e-6, "max_position_embeddings": 2048} | config | {"model_type": "llama"})


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    """Scales the queries so that attention's own 1 / sqrt(Dh) gives the file's scale, and the outputs of branches by
    the residual multiplier. If the head shares the embedding's table, the last norm's gain compensates the table's
    scale."""
    embedding, attention, residual, logits = (number(config, name, 1.0) for name in MULTIPLIERS)
    scales = {
        "embedding.tokens": embedding,
        "entry.gain": 1.0 / (logits * (embedding if model.tied else 1.0)),
        "query": attention * model.head_width**0.5,
        "out": residual,
        "down": residual,
    }

    def scaled(tensor: Tensor) -> Tensor:
        path = tensor.parts[0]
        name = path if path in scales else path.rpartition(".")[2].removesuffix("_bias")
        return tensor._replace(scale=scales.get(name, 1.0))

    return [scaled(tensor) for tensor in llama.tensors(model, config)]


FAMILY = Family(("granite",), read, tensors, read_only)
