"""The feed-forward branch. With `biases`, each of its linear maps has a bias."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from nagjax.layers import cpu
from nagjax.layers.linear import linear
from nagjax.layers.parameters import Scales, bias, matrix
from nagjax.layers.platform import on_one_cpu


class SwiGLU(nnx.Module):
    """`(silu(x W_gate) * (x W_up)) W_down`: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, width: int, hidden: int, scales: Scales, rngs: nnx.Rngs, biases: bool = False):
        self.gate = matrix(rngs, (width, hidden), ("embed", "mlp"))
        self.up = matrix(rngs, (width, hidden), ("embed", "mlp"), scales.inner)
        self.down = matrix(rngs, (hidden, width), ("mlp", "embed"), scales.output)
        self.gate_bias = bias(hidden, "mlp") if biases else None
        self.up_bias = bias(hidden, "mlp") if biases else None
        self.down_bias = bias(width, "embed") if biases else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if on_one_cpu() and self.gate_bias is None:
            return cpu.swiglu(x, *(weight[...].astype(x.dtype) for weight in (self.gate, self.up, self.down)))
        opened = jax.nn.silu(linear(x, self.gate, self.gate_bias))
        return linear(opened * linear(x, self.up, self.up_bias), self.down, self.down_bias)


class GELU(nnx.Module):
    """`gelu(x W_up) W_down`, with the tanh form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

    approximate = True

    def __init__(self, width: int, hidden: int, scales: Scales, rngs: nnx.Rngs, biases: bool = False):
        self.up = matrix(rngs, (width, hidden), ("embed", "mlp"), scales.inner)
        self.down = matrix(rngs, (hidden, width), ("mlp", "embed"), scales.output)
        self.up_bias = bias(hidden, "mlp") if biases else None
        self.down_bias = bias(width, "embed") if biases else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        up = jax.nn.gelu(linear(x, self.up, self.up_bias), approximate=self.approximate)
        return linear(up, self.down, self.down_bias)


class ExactGELU(GELU):
    """The same with the exact GELU, which uses the error function."""

    approximate = False


MLPS = {"swiglu": SwiGLU, "gelu": GELU, "gelu_exact": ExactGELU}
