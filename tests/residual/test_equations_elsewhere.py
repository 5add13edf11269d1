"""The residuals of GPT-2, GPT-NeoX and OLMo 2, recomputed in float64 numpy; and the same as plain where they meet."""

import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.layers.embedding import unembed
from nagjax.residual import find_scheme
from tests.residual.stack import assert_rows_close, build, normal, streams

BATCH, TOKENS, WIDTH, SUBLAYERS, VOCAB = 2, 3, 24, 6, 11


def wide(parameter):
    return np.asarray(parameter[...], np.float64)


def layer_norm(entry, h, epsilon=1e-5):
    centred = h - h.mean(-1, keepdims=True)
    return wide(entry.gain) * centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + epsilon) + wide(entry.bias)


def rms_norm(own, x, epsilon=1e-6):
    return wide(own.gain) * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon)


def inputs():
    return normal(1, BATCH, TOKENS, WIDTH), normal(2, SUBLAYERS, BATCH, TOKENS, WIDTH) + 0.3, normal(3, VOCAB, WIDTH)


@pytest.mark.parametrize("sublayers", [SUBLAYERS, SUBLAYERS - 1])
@pytest.mark.parametrize("name", ["layer_norm", "parallel"])
def test_layer_norm_in_turn_and_in_parallel(name, sublayers):
    """In parallel, the MLP (an even sublayer) reads the residual that attention has not written to. The head reads all
    of it, also where the last sublayer is odd."""
    scheme = find_scheme(name)()
    embedding, updates, table = inputs()
    stack = build(scheme, width=WIDTH, sublayers=sublayers)
    h = embedding.astype(np.float64)
    for done, stream in enumerate(streams(stack, embedding, updates[:sublayers])):
        before = h
        h = h + updates[done - 1] if done else h
        alone = name == "layer_norm" or done % 2 == 0 or done == sublayers
        read = layer_norm(stack.entries[done], h if alone else before)
        assert_rows_close(stream.hidden, h)
        assert_rows_close(scheme.read(stream), read)
    hidden, log_scale = scheme.close(stream, stack.ends)
    assert_rows_close(unembed(hidden, log_scale, scheme.head_rows(jnp.asarray(table))), read @ table.T, terms=WIDTH)


def test_reordered():
    scheme = find_scheme("reordered")()
    embedding, updates, table = inputs()
    stack = build(scheme, width=WIDTH, sublayers=SUBLAYERS)
    h = embedding.astype(np.float64)
    for done, stream in enumerate(streams(stack, embedding, updates)):
        h = h + rms_norm(stack.gates[done - 1], updates[done - 1].astype(np.float64)) if done else h
        assert_rows_close(scheme.read(stream), h)
    hidden, log_scale = scheme.close(stream, stack.ends)
    assert_rows_close(hidden, rms_norm(stack.ends, h))
    assert not np.any(log_scale)


def test_epsilon_is_an_option_of_plain():
    """Plain normalises with the epsilon it is given, and values out of range are refused."""
    embedding, updates, _ = inputs()
    loose, tight = (find_scheme("plain")(epsilon=epsilon) for epsilon in (0.5, 1e-6))
    stack = build(loose, width=WIDTH, sublayers=SUBLAYERS)
    h = embedding + updates[0]
    for scheme, epsilon in ((loose, 0.5), (tight, 1e-6)):
        stream = streams(stack._replace(scheme=scheme), embedding, updates[:1])[1]
        assert_rows_close(scheme.read(stream), rms_norm(stack.entries[1], h.astype(np.float64), epsilon))
    for name in ("plain", "layer_norm", "parallel", "reordered"):
        with pytest.raises(UserError, match="scheme.epsilon = 1.0"):
            find_scheme(name)(epsilon=1.0)
