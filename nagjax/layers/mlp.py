"""The feed-forward branch. With `biases`, each of its linear maps has a bias."""

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from nagjax.layers import cpu
from nagjax.layers.extra_columns import extra_columns
from nagjax.layers.int8 import Quantized
from nagjax.layers.linear import linear, linears_then
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
        if on_one_cpu() and self.gate_bias is None and not isinstance(self.gate[...], Quantized):
            weights = [weight[...].astype(x.dtype) for weight in (self.gate, self.up, self.down)]
            if (extra := extra_columns(x)) is None:
                return cpu.swiglu(x, *weights)[0]
            update, extra.product = cpu.swiglu(x, *weights, extra.weight.astype(x.dtype))
            return update
        return self._gated(x, jax.nn.silu)

    def _gated(self, x: Float[Array, "B T D"], opening: Callable[[Array], Array]) -> Float[Array, "B T D"]:
        maps = (self.gate, self.gate_bias), (self.up, self.up_bias)
        opened = linears_then(lambda gate, up: opening(gate) * up, x, *maps, extra=extra_columns(x))
        return linear(opened, self.down, self.down_bias)


class GEGLU(SwiGLU):
    """`(gelu(x W_gate) * (x W_up)) W_down`, with the tanh form of GELU: Shazeer 2020; Gemma."""

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self._gated(x, jax.nn.gelu)


class GELU(nnx.Module):
    """`gelu(x W_up) W_down`, with the tanh form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

    approximate = True

    def __init__(self, width: int, hidden: int, scales: Scales, rngs: nnx.Rngs, biases: bool = False):
        self.up = matrix(rngs, (width, hidden), ("embed", "mlp"), scales.inner)
        self.down = matrix(rngs, (hidden, width), ("mlp", "embed"), scales.output)
        self.up_bias = bias(hidden, "mlp") if biases else None
        self.down_bias = bias(width, "embed") if biases else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        opened = linears_then(self._opened, x, (self.up, self.up_bias), extra=extra_columns(x))
        return linear(opened, self.down, self.down_bias)

    def _opened(self, up: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        return jax.nn.gelu(up, approximate=self.approximate)


class ExactGELU(GELU):
    """The same with the exact GELU, which uses the error function."""

    approximate = False


class ReLU(GELU):
    """`relu(x W_up) W_down`: Vaswani et al. 2017, arXiv:1706.03762; OPT."""

    def _opened(self, up: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        return jax.nn.relu(up)


ACTIVATIONS = {
    "swiglu": jax.nn.silu,
    "geglu": jax.nn.gelu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}
MLPS = {"swiglu": SwiGLU, "geglu": GEGLU, "gelu": GELU, "gelu_exact": ExactGELU, "relu": ReLU}
