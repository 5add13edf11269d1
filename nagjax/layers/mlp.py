"""The feed-forward branch."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from nagjax.layers.parameters import matrix


class SwiGLU(nnx.Module):
    """`(silu(x W_gate) * (x W_up)) W_down`: Shazeer 2020, arXiv:2002.05202. No biases."""

    def __init__(self, width: int, hidden: int, output_scale: float, rngs: nnx.Rngs):
        self.gate = matrix(rngs, (width, hidden), ("embed", "mlp"))
        self.up = matrix(rngs, (width, hidden), ("embed", "mlp"))
        self.down = matrix(rngs, (hidden, width), ("mlp", "embed"), output_scale)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up, down = (weight[...].astype(x.dtype) for weight in (self.gate, self.up, self.down))
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down


class GELU(nnx.Module):
    """`gelu(x W_up) W_down`, no biases."""

    def __init__(self, width: int, hidden: int, output_scale: float, rngs: nnx.Rngs):
        self.up = matrix(rngs, (width, hidden), ("embed", "mlp"))
        self.down = matrix(rngs, (hidden, width), ("mlp", "embed"), output_scale)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return jax.nn.gelu(x @ self.up[...].astype(x.dtype)) @ self.down[...].astype(x.dtype)
