"""The feed-forward branch, the embedding and the head, in numpy."""

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx

from nagjax.layers.attention import Where
from nagjax.layers.embedding import Embedding, Head, unembed
from nagjax.layers.mlp import MLP
from nagjax.layers.parameters import Scales, matrix
from tests import tiny
from tests.tolerance import assert_close

X = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)


def wide(parameter):
    return np.asarray(parameter[...], float)


def test_swiglu():
    mlp = MLP("swiglu", 8, 12, Scales(), nnx.Rngs(0))
    gate, up = X @ wide(mlp.gate), X @ wide(mlp.up)
    assert_close(mlp(X), (gate / (1 + np.exp(-gate)) * up) @ wide(mlp.down), terms=48, chain=3)


def test_gelu():
    mlp = MLP("gelu", 8, 12, Scales(), nnx.Rngs(0))
    up = X @ wide(mlp.up)
    exact = 0.5 * up * (1 + np.vectorize(math.erf)(up / np.sqrt(2)))
    np.testing.assert_allclose(mlp(X), exact @ wide(mlp.down), atol=5e-3)  # the tanh form is within 5e-4 of it
    tanh = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    assert_close(mlp(X), tanh @ wide(mlp.down), terms=48, chain=3)


def test_matrices_start_with_unit_gain_times_their_scale():
    value = wide(matrix(nnx.Rngs(0), (256, 128), ("embed", "mlp"), 0.3))
    np.testing.assert_allclose(value.std(), 0.3 / 16, rtol=0.02)
    assert matrix(nnx.Rngs(0), (2, 2), ("embed", "mlp")).get_metadata()["role"] == "matrix"


def test_embedding_adds_learned_positions_by_place_in_the_document():
    config = tiny.model_config(positions="learned")
    embedding = Embedding(config, 1.0, nnx.Rngs(0))
    tokens, where = jnp.array([[3, 1, 3]]), Where(jnp.array([[1, 1, 2]]), jnp.array([[0, 1, 0]]))
    rows, positions = wide(embedding.tokens), wide(embedding.positions)
    want = [[rows[3] + positions[0], rows[1] + positions[1], rows[3] + positions[0]]]
    assert_close(embedding(tokens, where, jnp.float32), want, terms=2)
    assert embedding(tokens, where, jnp.bfloat16).dtype == jnp.bfloat16
    assert Embedding(tiny.model_config(), 1.0, nnx.Rngs(0)).positions is None


def test_logits_are_float32_and_scaled():
    head = Head(tiny.model_config(width=8), 1.0, nnx.Rngs(0))
    log_scale = jnp.log(jnp.arange(1.0, 7.0).reshape(2, 3))
    want = np.arange(1.0, 7.0).reshape(2, 3, 1) * (X @ wide(head.tokens).T)
    assert_close(unembed(X, log_scale, head.tokens[...]), want, terms=16, chain=2)
    assert unembed(jnp.bfloat16(X), log_scale, head.tokens[...]).dtype == jnp.float32
