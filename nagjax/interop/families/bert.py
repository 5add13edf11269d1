"""BERT: an encoder with Post-LN, learned position and token-type embeddings, biases everywhere, and a head with a layer
of its own.

The pooler and heads for whole sequences are left out, because the tokens' hidden states do not depend on them. A model
without a head for masked tokens (BertModel and others) is read without a head: it has hidden states, but no logits.
"""

import re
from typing import NamedTuple

import numpy as np

from nagjax.interop.families import Family
from nagjax.interop.families.common import learned_positions, number, only, read_sizes, refuse, write_sizes
from nagjax.interop.families.gpt2 import ACTIVATIONS, BIASES, check_blocks
from nagjax.interop.tensors import ATTENTION, MLP, Tensor, biased, layer_norms, same
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.post_layer_norm import PostLayerNorm

KNOWN = ACTIVATIONS | {"relu": "relu"}
UNUSED = re.compile(r"(^|\.)(pooler|seq_relationship|classifier|qa_outputs)\.|\.position_ids$")
WITH_HEAD = ("ForMaskedLM", "ForPreTraining")


class HeadNames(NamedTuple):
    """Names of the tensors of the head for masked tokens."""

    dense: str
    norm: str
    table: str
    bias: str  # of a head that shares the embedding's table; other heads keep it beside their table


HEAD = HeadNames(*(f"cls.predictions.{name}" for name in ("transform.dense", "transform.LayerNorm", "decoder", "bias")))


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    only(config, "is_decoder", (False,), False)
    only(config, "add_cross_attention", (False,), False)
    only(config, "position_embedding_type", ("absolute",), "absolute")
    activation = only(config, "hidden_act", tuple(KNOWN), "gelu")
    epsilon = number(config, "layer_norm_eps", 1e-12)
    context = learned_positions(config, 512)
    sizes = read_sizes(config | {"max_position_embeddings": context}, context, tied=True)
    head = any(str(name).endswith(WITH_HEAD) for name in config.get("architectures") or WITH_HEAD)
    model = ModelConfig(
        **sizes | {"kv_heads": sizes["heads"], "tied": sizes["tied"] or not head},
        mlp=KNOWN[activation],
        positions="learned",
        qk_norm=False,
        causal=False,
        token_types=config.get("type_vocab_size", 2),
        head_epsilon=epsilon if head else None,
        block=BlockConfig(biases=BIASES),
    )
    return model, PostLayerNorm(epsilon=epsilon)


def prepare(files: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Drops the tensors that are left out, and renames gamma and beta, the names of a norm's gain and bias in old
    files."""
    old = {"gamma": "weight", "beta": "bias"}
    rename = lambda name: re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda found: old[found[0]], name)  # noqa: E731
    return used({rename(name): value for name, value in files.items()}, HEAD)


def used(files: dict[str, np.ndarray], head: HeadNames) -> dict[str, np.ndarray]:
    """The tensors on which the tokens' hidden states and the logits of masked tokens depend."""
    twice = {head.bias} if f"{head.table}.bias" in files else set()
    return {name: value for name, value in files.items() if name not in twice and not UNUSED.search(name)}


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    return [same("bert.embeddings.position_embeddings.weight", "embedding.positions"), *named(model, "bert", HEAD)]


def named(model: ModelConfig, base: str, head: HeadNames) -> list[Tensor]:
    """All tensors except the positions."""
    layer = f"{base}.encoder.layer.{{}}"
    maps = {f"{layer}.attention.self.{name}": f"{ATTENTION}.branch.{name}" for name in ("query", "key", "value")}
    maps |= {
        f"{layer}.attention.output.dense": f"{ATTENTION}.branch.out",
        f"{layer}.intermediate.dense": f"{MLP}.branch.up",
        f"{layer}.output.dense": f"{MLP}.branch.down",
    }
    norms = {
        f"{base}.embeddings.LayerNorm": "ends",
        f"{layer}.attention.output.LayerNorm": f"{ATTENTION}.gate",
        f"{layer}.output.LayerNorm": f"{MLP}.gate",
    }
    if model.head_epsilon is not None:
        maps[head.dense], norms[head.norm] = "transform.map", "transform"
    found = [same(f"{base}.embeddings.word_embeddings.weight", "embedding.tokens")]
    if model.token_types:
        found.append(same(f"{base}.embeddings.token_type_embeddings.weight", "embedding.types"))
    found += biased(maps) + layer_norms(norms)
    if model.head_epsilon is None:
        return found
    names = (head.bias, f"{head.table}.bias")
    name, alias = names if model.tied else names[::-1]
    found.append(same(name, "transform.table_bias")._replace(alias=alias))
    return found if model.tied else [*found, same(f"{head.table}.weight", "head.tokens")]


def write(model: ModelConfig, scheme: Scheme) -> dict:
    refuse("scheme", scheme.name, ("post_layer_norm",), "its residual is Post-LN by LayerNorm")
    refuse("causal", model.causal, (False,), "its attention sees later tokens")
    refuse("positions", model.positions, ("learned",), "its positions are learned")
    check_blocks(model, tuple(KNOWN.values()))
    refuse("head_epsilon", model.head_epsilon, (scheme.epsilon, None), "one epsilon is for all norms, scheme.epsilon")
    refuse("block.biases", set(model.block.biases), (set(BIASES),), f"it has all of {', '.join(BIASES)}")
    sizes = write_sizes(model)
    del sizes["num_key_value_heads"]
    return {
        "architectures": ["BertModel" if model.head_epsilon is None else "BertForMaskedLM"],
        "model_type": "bert",
        **sizes,
        "hidden_act": {"gelu": "gelu_new", "gelu_exact": "gelu", "relu": "relu"}[model.mlp],
        "layer_norm_eps": scheme.epsilon,
        "type_vocab_size": model.token_types,
    }


OPTIONS = ("causal", "token_types", "head_epsilon")
FAMILY = Family(("bert",), read, tensors, write, prefix="bert.", prepare=prepare, options=OPTIONS)
