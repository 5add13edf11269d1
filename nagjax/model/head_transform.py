"""The parts of BERT's head besides its table."""

from flax import nnx
from jaxtyping import Array, Float

from nagjax.layers.linear import linear
from nagjax.layers.mlp import ACTIVATIONS
from nagjax.layers.parameters import bias, gain, matrix
from nagjax.residual.norm import layer_norm


class HeadTransform(nnx.Module):
    """`LN(act(x W + b))` in front of the table, with the MLP's activation, and `table_bias` on the logits: Devlin et
    al. 2018, arXiv:1810.04805."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.epsilon, self.opening = config.head_epsilon, config.mlp
        self.map = matrix(rngs, (config.width, config.width), ("embed", None))
        self.map_bias = bias(config.width, "embed")
        self.gain, self.bias = gain(config.width, "embed"), bias(config.width, "embed")
        self.table_bias = bias(config.vocab, "vocab")

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        opened = ACTIVATIONS[self.opening](linear(hidden, self.map, self.map_bias))
        return layer_norm(opened, self.gain[...], self.bias[...], self.epsilon)
