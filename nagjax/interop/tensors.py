"""How tensors of other formats hold nagjax's parameters: names, and layouts that go both ways."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

BLOCK = "{}"  # in a tensor's name: the block's number


class Tensor(NamedTuple):
    """One tensor of a file format and the parameters, by dotted path, that it holds. A name with `{}` stands for one
    tensor per block, and its parameters are the stacked ones. Parameters are `scale * file + offset`, in float32; with
    no name, a constant that the format has no tensor for. With `experts`, a second `{}` stands for the expert, along
    the parameters' axis after the blocks'."""

    name: str
    parts: tuple[str, ...]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]] = lambda x: (
        x,
    )  # the parts of a tensor, views where possible
    join: Callable[..., np.ndarray] = lambda x: x  # a tensor of its parts
    alias: str = ""  # another name that files have for it
    scale: float = 1.0
    offset: float = 0.0
    experts: int = 0

    @property
    def each(self) -> int:
        """Tensors of a block."""
        return self.experts or 1

    def names(self, block: int) -> list[str]:
        """Of a block's tensors."""
        if not self.experts:
            return [self.name.format(block)]
        return [self.name.format(block, expert) for expert in range(self.experts)]

    @property
    def stacked(self) -> bool:
        return BLOCK in self.name or not self.name and self.parts[0].startswith("blocks.")

    def value(self, part: np.ndarray) -> np.ndarray:
        """Of a parameter, from what a file holds of it."""
        if self.scale == 1.0 and not self.offset:
            return part
        return np.float32(self.scale) * part.astype(np.float32) + np.float32(self.offset)

    def content(self, tensor: np.ndarray) -> np.ndarray:
        """The inverse of `value`, of a whole tensor."""
        if self.scale == 1.0 and not self.offset:
            return tensor
        return (tensor.astype(np.float32) - np.float32(self.offset)) / np.float32(self.scale)


def same(name: str, part: str) -> Tensor:
    return Tensor(name, (part,))


def constant(part: str, value: float) -> Tensor:
    """A parameter that a format has not, since there it could only have this value."""
    return Tensor("", (part,), offset=value)


def shared(name: str, *parts: str) -> Tensor:
    """One tensor that several parameters start from."""
    return Tensor(name, parts, lambda x: (x,) * len(parts), lambda *own: own[0])


def transposed(name: str, part: str) -> Tensor:
    """PyTorch's linear maps are [out, in], nagjax's are [in, out]."""
    return Tensor(name, (part,), lambda x: (x.T,), lambda x: x.T)


def biased(maps: dict[str, str]) -> list[Tensor]:
    """PyTorch's linear maps with their biases."""
    weights = [transposed(f"{name}.weight", path) for name, path in maps.items()]
    return weights + [same(f"{name}.bias", f"{path}_bias") for name, path in maps.items()]


def layer_norms(norms: dict[str, str]) -> list[Tensor]:
    """LayerNorms' gains and biases."""
    parts = {"weight": "gain", "bias": "bias"}
    return [same(f"{name}.{own}", f"{path}.{part}") for name, path in norms.items() for own, part in parts.items()]


def later_rows(name: str, part: str, unused: int) -> Tensor:
    """A table in which so many rows, of zeros where it is written, stand before the first that is used."""
    return Tensor(
        name,
        (part,),
        lambda x: (x[unused:],),
        lambda x: np.concatenate([np.zeros_like(x, shape=(unused, x.shape[1])), x]),
    )


def stacked_rows(name: str, parts: tuple[str, ...], sizes: tuple[int, ...]) -> Tensor:
    """Several of PyTorch's linear maps in one, with so many outputs each."""
    ends = tuple(int(end) for end in np.cumsum(sizes))

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        if x.shape[0] != ends[-1]:
            raise ValueError
        return tuple(part.T for part in np.split(x, ends[:-1]))

    return Tensor(name, parts, split, lambda *own: np.concatenate([part.T for part in own]))


ATTENTION, MLP = "blocks.attention", "blocks.mlp"
QKV = tuple(f"{ATTENTION}.branch.{name}" for name in ("query", "key", "value"))
QKV_BIAS = tuple(f"{path}_bias" for path in QKV)
