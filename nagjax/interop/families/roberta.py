"""RoBERTa and XLM-RoBERTa: BERT under other names, with positions after two unused rows."""

import numpy as np

from nagjax.interop.families import Family, bert, read_only
from nagjax.interop.families.common import LONGEST, learned_positions
from nagjax.interop.tensors import Tensor, later_rows
from nagjax.model.config import ModelConfig
from nagjax.ranges import Natural, check_value
from nagjax.residual import Scheme

HEAD = bert.HeadNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")


def unused(config: dict) -> int:
    """Rows in the table of positions before the first used one: those up to the padding position. Raises UserError."""
    padding = config.get("pad_token_id", 1)
    check_value("config.json: pad_token_id", padding, Natural, "positions begin behind it")
    return padding + 1


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    rows = learned_positions(config, 512)
    return bert.read(config | {"max_position_embeddings": rows - unused(config), LONGEST: None})


def prepare(files: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors on which the logits of masked tokens depend."""
    return bert.used(files, HEAD)


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    positions = later_rows("roberta.embeddings.position_embeddings.weight", "embedding.positions", unused(config))
    return [positions, *bert.named(model, "roberta", HEAD)]


FAMILY = Family(("roberta", "xlm-roberta"), read, tensors, read_only, prefix="roberta.", prepare=prepare)
