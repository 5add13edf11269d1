"""Describes how the tensors of other formats hold nagjax's parameters: their names, and conversions in both
directions."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

BLOCK = "{}"  # stands for the block's number in a tensor's name


class Tensor(NamedTuple):
    """One tensor of a file format, and the parameters, by dotted path, that it holds. A name with `{}` stands for one
    tensor per block, whose parameters are stacked over blocks. Parameters are `scale * file + offset`, in float32. An
    empty name means a constant, for which the format has no tensor. With `experts`, a second `{}` stands for the
    expert, and the parameters have an axis of experts after that of the blocks."""

    name: str
    parts: tuple[str, ...]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]] = lambda x: (
        x,
    )  # the parts of a tensor, views where possible
    join: Callable[..., np.ndarray] = lambda x: x  # the inverse: a tensor from its parts
    alias: str = ""  # another name that some files use for it
    scale: float = 1.0
    offset: float = 0.0
    experts: int = 0

    @property
    def each(self) -> int:
        """The number of tensors per block."""
        return self.experts or 1

    def names(self, block: int) -> list[str]:
        """The names of a block's tensors."""
        if not self.experts:
            return [self.name.format(block)]
        return [self.name.format(block, expert) for expert in range(self.experts)]

    @property
    def stacked(self) -> bool:
        return BLOCK in self.name or not self.name and self.parts[0].startswith("blocks.")

    def value(self, part: np.ndarray) -> np.ndarray:
        """The parameter's value, from the part of the file's tensor that holds it."""
        if self.scale == 1.0 and not self.offset:
            return part
        return np.float32(self.scale) * part.astype(np.float32) + np.float32(self.offset)

    def content(self, tensor: np.ndarray) -> np.ndarray:
        """The inverse of `value`, for a whole tensor."""
        if self.scale == 1.0 and not self.offset:
            return tensor
        return (tensor.astype(np.float32) - np.float32(self.offset)) / np.float32(self.scale)


def same(name: str, part: str) -> Tensor:
    return Tensor(name, (part,))


def constant(part: str, value: float) -> Tensor:
    """A parameter that the format lacks, because in its models it always has this value."""
    return Tensor("", (part,), offset=value)


def shared(name: str, *parts: str) -> Tensor:
    """One tensor from which several parameters are read."""
    return Tensor(name, parts, lambda x: (x,) * len(parts), lambda *own: own[0])


def transposed(name: str, part: str) -> Tensor:
    """A linear map: PyTorch stores [out, in], nagjax [in, out]."""
    return Tensor(name, (part,), lambda x: (x.T,), lambda x: x.T)


def biased(maps: dict[str, str]) -> list[Tensor]:
    """PyTorch's linear maps with their biases, by name in the file."""
    weights = [transposed(f"{name}.weight", path) for name, path in maps.items()]
    return weights + [same(f"{name}.bias", f"{path}_bias") for name, path in maps.items()]


def layer_norms(norms: dict[str, str]) -> list[Tensor]:
    """LayerNorms' gains and biases, by name in the file."""
    parts = {"weight": "gain", "bias": "bias"}
    return [same(f"{name}.{own}", f"{path}.{part}") for name, path in norms.items() for own, part in parts.items()]


def later_rows(name: str, part: str, unused: int) -> Tensor:
    """A table whose first `unused` rows are not used; they are written as zeros."""
    return Tensor(
        name,
        (part,),
        lambda x: (x[unused:],),
        lambda x: np.concatenate([np.zeros_like(x, shape=(unused, x.shape[1])), x]),
    )


def stacked_rows(name: str, parts: tuple[str, ...], sizes: tuple[int, ...]) -> Tensor:
    """Several linear maps joined into one of PyTorch's, with `sizes` outputs each."""
    ends = tuple(int(end) for end in np.cumsum(sizes))

    def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
        if x.shape[0] != ends[-1]:
            raise ValueError
        return tuple(part.T for part in np.split(x, ends[:-1]))

    return Tensor(name, parts, split, lambda *own: np.concatenate([part.T for part in own]))


ATTENTION, MLP = "blocks.attention", "blocks.mlp"
QKV = tuple(f"{ATTENTION}.branch.{name}" for name in ("query", "key", "value"))
QKV_BIAS = tuple(f"{path}_bias" for path in QKV)
