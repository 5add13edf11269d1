"""The feed-forward branch. With `biases`, each of its linear maps has a bias."""

import functools

import jax
from flax import nnx
from jaxtyping import Array, Float

from nagjax.layers import cpu
from nagjax.layers.config import GATED
from nagjax.layers.extra_columns import extra_columns
from nagjax.layers.int8 import Quantized
from nagjax.layers.linear import linear, linears_then
from nagjax.layers.parameters import Scales, bias, matrix
from nagjax.layers.platform import on_one_cpu

ACTIVATIONS = {
    "swiglu": jax.nn.silu,
    "geglu": jax.nn.gelu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}


def opened(kind: str, *products: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """`act(up)`, or with a gate `act(gate) * up`. products: up, or gate and up."""
    *gate, up = products
    return ACTIVATIONS[kind](*gate) * up if gate else ACTIVATIONS[kind](up)


class MLP(nnx.Module):
    """`act(x W_up) W_down`, or with a gate `(act(x W_gate) * (x W_up)) W_down`, by `kind`:

    - swiglu: gated, silu (Shazeer 2020, arXiv:2002.05202)
    - geglu: gated, the tanh form of GELU (Shazeer 2020; Gemma)
    - gelu: the tanh form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)
    - gelu_exact: GELU by the error function
    - relu: Vaswani et al. 2017, arXiv:1706.03762; OPT
    """

    def __init__(self, kind: str, width: int, hidden: int, scales: Scales, rngs: nnx.Rngs, biases: bool = False):
        self.kind, gated = kind, kind in GATED
        self.gate = matrix(rngs, (width, hidden), ("embed", "mlp")) if gated else None
        self.up = matrix(rngs, (width, hidden), ("embed", "mlp"), scales.inner)
        self.down = matrix(rngs, (hidden, width), ("mlp", "embed"), scales.output)
        self.gate_bias = bias(hidden, "mlp") if gated and biases else None
        self.up_bias = bias(hidden, "mlp") if biases else None
        self.down_bias = bias(width, "embed") if biases else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        plain = self.gate_bias is None and not isinstance(self.up[...], Quantized)
        if self.kind == "swiglu" and self.gate is not None and plain and on_one_cpu():
            weights = [weight[...].astype(x.dtype) for weight in (self.gate, self.up, self.down)]
            if (extra := extra_columns(x)) is None:
                return cpu.swiglu(x, *weights)[0]
            update, extra.product = cpu.swiglu(x, *weights, extra.weight.astype(x.dtype))
            return update
        maps = [] if self.gate is None else [(self.gate, self.gate_bias)]
        opening = functools.partial(opened, self.kind)
        inner = linears_then(opening, x, *maps, (self.up, self.up_bias), extra=extra_columns(x))
        return linear(inner, self.down, self.down_bias)
