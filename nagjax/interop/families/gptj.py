"""GPT-J: parallel branches that read one LayerNorm, rotary on pairs of adjacent features, a head with a bias. Import
only."""

import functools
import math

import numpy as np

from nagjax.errors import UserError
from nagjax.interop.families import Family, read_only
from nagjax.interop.families.common import need, number, only
from nagjax.interop.families.gpt2 import ACTIVATIONS, read_sizes
from nagjax.interop.head_bias import fold_head_bias
from nagjax.interop.tensors import ATTENTION, MLP, Tensor, biased, layer_norms, same, shared, transposed
from nagjax.layers.config import BlockConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme
from nagjax.residual.schemes.parallel import Parallel


def read(config: dict) -> tuple[ModelConfig, Scheme]:
    sizes, (rotated,) = read_sizes(config), need(config, "rotary_dim")
    head_width = sizes["width"] // sizes["heads"]
    activation = only(config, "activation_function", tuple(ACTIVATIONS), "gelu_new")
    only(config, "tie_word_embeddings", (False,), False)
    if rotated > head_width:
        raise UserError("config.json: rotary_dim", rotated, f"a head has {head_width} features")
    model = ModelConfig(
        **sizes,
        mlp=ACTIVATIONS[activation],
        qk_norm=False,
        block=BlockConfig(biases=("mlp",), rotated=_share(rotated, head_width)),
    )
    return model, Parallel(epsilon=number(config, "layer_norm_epsilon", 1e-5))


def _share(rotated: int, head_width: int) -> float:
    """A share from which the model's `int(head_width * share)` recovers exactly `rotated`."""
    share = rotated / head_width
    return share if int(head_width * share) == rotated else math.nextafter(share, 1.0)


def _halves(x: np.ndarray, heads: int, rotated: int) -> tuple[np.ndarray]:
    """[H * Dh, D] to [D, H * Dh]. Of the rotated features, the first ones of all pairs of neighbours are moved to the
    front, followed by the second ones."""
    by_head = x.reshape(heads, -1, x.shape[1])
    parts = by_head[:, 0:rotated:2], by_head[:, 1:rotated:2], by_head[:, rotated:]
    return (np.concatenate(parts, axis=1).reshape(x.shape).T,)


def _pairs(x: np.ndarray, heads: int, rotated: int) -> np.ndarray:
    """The inverse of `_halves`."""
    by_head = x.T.reshape(heads, -1, x.shape[0])
    pairs = by_head[:, :rotated].reshape(heads, 2, rotated // 2, -1).swapaxes(1, 2).reshape(heads, rotated, -1)
    return np.concatenate([pairs, by_head[:, rotated:]], axis=1).reshape(-1, x.shape[0])


def tensors(model: ModelConfig, config: dict) -> list[Tensor]:
    h, order = "transformer.h.{}", dict(heads=model.heads, rotated=model.rotated_width)
    split, join = functools.partial(_halves, **order), functools.partial(_pairs, **order)
    turned = {"q": "query", "k": "key"}
    return [
        same("transformer.wte.weight", "embedding.tokens"),
        same("lm_head.weight", "head.tokens"),
        *(Tensor(f"{h}.attn.{x}_proj.weight", (f"{ATTENTION}.branch.{y}",), split, join) for x, y in turned.items()),
        transposed(f"{h}.attn.v_proj.weight", f"{ATTENTION}.branch.value"),
        transposed(f"{h}.attn.out_proj.weight", f"{ATTENTION}.branch.out"),
        *biased({f"{h}.mlp.fc_in": f"{MLP}.branch.up", f"{h}.mlp.fc_out": f"{MLP}.branch.down"}),
        *one_norm(f"{h}.ln_1", "transformer.ln_f"),
    ]


def one_norm(own: str, last: str) -> list[Tensor]:
    """One LayerNorm that both branches of a block read, and the last one of the model."""
    found = layer_norms({last: "entry"})
    for name, part in (("weight", "gain"), ("bias", "bias")):
        found.append(shared(f"{own}.{name}", f"{ATTENTION}.entry.{part}", f"{MLP}.entry.{part}"))
    return found


def prepare(files: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return fold_head_bias(files, "lm_head", "transformer.ln_f")


FAMILY = Family(("gptj",), read, tensors, read_only, "transformer.", prepare)
