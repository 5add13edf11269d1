"""RoBERTa and XLM-RoBERTa: BERT under other names, with positions after two unused rows."""

import numpy as np

from nagjax.interop.families import Family, bert, read_only
from nagjax.interop.families.common import LONGEST, learned_positions
from nagjax.interop.families.opt import UNUSED
from nagjax.interop.tensors import Tensor, later_rows
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme

HEAD = bert.HeadNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    rows = learned_positions(config, 512)
    return bert.read(config | {"max_position_embeddings": rows - UNUSED, LONGEST: None})


def prepare(files: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the logits of masked tokens depend on."""
    return bert.used(files, HEAD)


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    positions = later_rows("roberta.embeddings.position_embeddings.weight", "embedding.positions", UNUSED)
    return [positions, *bert.named(model, "roberta", HEAD)]


FAMILY = Family(("roberta", "xlm-roberta"), read, tensors, read_only, prefix="roberta.", prepare=prepare)
