"""How tensors of other formats hold nagjax's parameters: names, and layouts that go both ways."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

BLOCK = "{}"  # in a tensor's name: the block's number


class Tensor(NamedTuple):
    """One tensor of a file format and the parameters, by dotted path, that it holds. A name with `{}` stands for one
    tensor per block, and its parameters are the stacked ones."""

    name: str
    parts: tuple[str, ...]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]] = lambda x: (
        x,
    )  # the parts of a tensor, views where possible
    join: Callable[..., np.ndarray] = lambda x: x  # a tensor of its parts
    alias: str = ""  # another name that files have for it

    @property
    def stacked(self) -> bool:
        return BLOCK in self.name


def same(name: str, part: str) -> Tensor:
    return Tensor(name, (part,))


def transposed(name: str, part: str) -> Tensor:
    """PyTorch's linear maps are [out, in], nagjax's are [in, out]."""
    return Tensor(name, (part,), lambda x: (x.T,), lambda x: x.T)


ATTENTION, MLP = "blocks.attention", "blocks.mlp"
QKV = tuple(f"{ATTENTION}.branch.{name}" for name in ("query", "key", "value"))
QKV_BIAS = tuple(f"{path}_bias" for path in QKV)
