"""Phi-1, 1.5 and 2: parallel branches that read one LayerNorm, rotary on a part of each head, biases everywhere, even
in the head. Import only."""

import numpy as np

from nagjax.interop.families import Family, read_only
from nagjax.interop.families.common import number, only, read_rope, read_sizes
from nagjax.interop.families.gpt2 import ACTIVATIONS, BIASES
from nagjax.interop.families.gptj import one_norm
from nagjax.interop.head_bias import fold_head_bias
from nagjax.interop.tensors import ATTENTION, MLP, Tensor, biased, same
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.parallel import Parallel


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    activation = only(config, "hidden_act", tuple(ACTIVATIONS), "gelu_new")
    only(config, "qk_layernorm", (False,), False)
    only(config, "tie_word_embeddings", (False,), False)
    sizes = read_sizes(config, 2048)
    base, rope, share = read_rope(config, sizes["context"])
    model = ModelConfig(
        **sizes,
        mlp=ACTIVATIONS[activation],
        rope_base=base,
        qk_norm=False,
        block=BlockConfig(biases=BIASES, rotated=0.5 if share is None else share, rope=rope),
    )
    return model, Parallel(epsilon=number(config, "layer_norm_eps", 1e-5))


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    layer = "model.layers.{}"
    maps = {f"self_attn.{name[0]}_proj": f"{ATTENTION}.branch.{name}" for name in ("query", "key", "value")}
    maps |= {"self_attn.dense": f"{ATTENTION}.branch.out"}
    maps |= {"mlp.fc1": f"{MLP}.branch.up", "mlp.fc2": f"{MLP}.branch.down"}
    found = one_norm(f"{layer}.input_layernorm", "model.final_layernorm")
    found += biased({f"{layer}.{name}": path for name, path in maps.items()})
    return [*found, same("model.embed_tokens.weight", "embedding.tokens"), same("lm_head.weight", "head.tokens")]


def prepare(files: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return fold_head_bias(files, "lm_head", "model.final_layernorm")


FAMILY = Family(("phi",), read, tensors, read_only, prepare=prepare)
