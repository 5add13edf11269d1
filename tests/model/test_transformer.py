"""The Transformer as a whole: packing, padding, rematerialisation, its options."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nagjax
from nagjax.errors import UserError
from nagjax.layers.attention import Where
from nagjax.layers.config import BlockConfig
from nagjax.mod import ModConfig
from nagjax.model.transformer import Transformer
from nagjax.residual import find_scheme
from nagjax.train.loss import cross_entropy
from tests import tiny
from tests.tolerance import assert_close

NAG = find_scheme("nag")()


def make(scheme=NAG, **changes) -> Transformer:
    return Transformer(tiny.model_config(**changes), scheme, nnx.Rngs(0))


def logits(model, tokens, where):
    graph, params = nnx.split(model)

    @jax.jit
    def run(params, tokens, where):
        model = nnx.merge(graph, params)
        return model.logits(model(tokens, where))

    return np.asarray(run(params, jnp.asarray(tokens), Where(*map(jnp.asarray, where))))


@pytest.mark.parametrize("scheme, positions", [("plain", "learned"), ("nag", "rotary")])
def test_a_document_packed_behind_another_is_as_alone(scheme, positions):
    """Three rows: documents a and b packed; b alone; a with other padding."""
    a, b = [5, 9, 2], [7, 1, 30, 4]
    tokens = np.array([a + b + [0], b + [0, 0, 0, 0], a + [31, 30, 29, 28, 27]])
    segments = np.array([[1] * 3 + [2] * 4 + [0], [1] * 4 + [0] * 4, [1] * 3 + [0] * 5])
    places = np.array([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 0, 0, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0]])
    out = logits(make(find_scheme(scheme)(), positions=positions), tokens, (segments, places))
    assert_close(out[0, 3:7], out[1, :4], **tiny.FORWARD)
    assert_close(out[0, :3], out[2, :3], **tiny.FORWARD)
    assert np.all(np.isfinite(out))
    joined = logits(
        make(find_scheme(scheme)(), positions=positions), tokens[:1], (np.ones((1, 8), int), np.arange(8)[None])
    )
    assert np.abs(joined[0, 3:7] - out[0, 3:7]).max() > 1e-3  # as one document they do see each other


def gradient(model, batch):
    graph, params = nnx.split(model)

    def loss(params):
        model = nnx.merge(graph, params)
        sums = cross_entropy(model.logits(model(batch.tokens, batch.where)), batch)
        return sums.nats / sums.count

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return value, nnx.to_pure_dict(grads)


@functools.cache
def reference():
    return gradient(make(), tiny.packed_batch())


@pytest.mark.parametrize("remat", ["block", "dots"])
def test_rematerialisation_changes_nothing(remat):
    value, grads = gradient(make(remat=remat), tiny.packed_batch())
    assert_close(value, reference()[0], **tiny.FORWARD)
    assert_close(grads, reference()[1], **tiny.STEP)


def test_padding_changes_neither_loss_nor_gradient():
    batch = tiny.packed_batch()
    padding = batch.segment_ids == 0
    assert padding.any()
    noise = np.where(padding, 31, 0)
    other = batch._replace(tokens=(batch.tokens + noise) % 32, targets=(batch.targets + noise) % 32)
    value, grads = gradient(make(), other)
    assert_close(value, reference()[0], **tiny.FORWARD)
    assert_close(grads, reference()[1], **tiny.STEP)


def test_tied_and_untied_heads():
    batch = tiny.packed_batch()
    untied, tied = make(find_scheme("plain")()), make(find_scheme("plain")(), tied=True)
    assert untied.head is not None and tied.head is None
    np.testing.assert_array_equal(tied.head_rows(), tied.embedding.tokens[...])
    np.testing.assert_array_equal(untied.head_rows(), untied.head.tokens[...])
    out = logits(tied, batch.tokens, batch.where)
    assert out.shape == (8, 8, 32) and out.std() < 1.0  # the shared table starts where the head wants it
    _, grads = gradient(tied, batch)
    unseen = np.setdiff1d(np.arange(32), batch.tokens)
    assert np.all(np.any(np.asarray(grads["embedding"]["tokens"])[unseen] != 0, axis=-1))  # through the head alone


@pytest.mark.parametrize("changes", [{}, {"positions": "learned"}])
def test_nags_first_logits_have_a_spread_of_a_half_whatever_its_rows_are_sums_of(changes):
    model = make(find_scheme("nag")(), width=64, **changes)
    tokens = jnp.arange(64).reshape(8, 8) % 32
    assert 0.45 < model.logits(model(tokens, progress=0.0)).std() < 0.55


def test_options_change_the_parameters_they_name():
    def names(model):
        leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
        return {jax.tree_util.keystr(path) for path, _ in leaves}

    def shape(**changes):
        return nnx.eval_shape(lambda: make(**changes))

    base = names(shape())
    assert base - names(shape(mlp="gelu")) == {"['blocks']['mlp']['branch']['gate']"}
    assert names(shape(positions="learned")) - base == {"['embedding']['positions']"}
    assert base - names(shape(tied=True)) == {"['head']['tokens']"}
    model = shape(mlp="gelu", depth=5)
    assert model.blocks.mlp.branch.up.shape == (5, 16, 64)
    assert model.blocks.attention.branch.key.shape == (5, 16, 8)


def test_gelu_blocks_run_and_learn():
    value, grads = gradient(make(mlp="gelu", qk_norm=False), tiny.packed_batch())
    assert np.isfinite(value) and all(
        np.any(np.asarray(g) != 0) for g in jax.tree.leaves(grads["blocks"]["mlp"]["branch"])
    )


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_where_it_matters():
    model = make(dtype="bfloat16")
    output = jax.eval_shape(lambda m: m(jnp.zeros((2, 8), jnp.int32), Where.whole(2, 8)), model)
    assert output.hidden.dtype == jnp.bfloat16 and output.log_scale.dtype == jnp.float32
    assert {p.dtype for p in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}


def test_padding_has_no_learned_position():
    model, tokens = make(depth=1, positions="learned"), jnp.ones((1, 4), jnp.int32)
    segments = jnp.asarray([[0, 1, 1, 1]])
    model(tokens, Where(segments, jnp.cumsum(segments, axis=1) - 1))
    with pytest.raises(UserError, match="where.positions = -1: the model has learned"):
        model(tokens, Where(segments, jnp.cumsum(segments, axis=1) - 2))


@pytest.mark.parametrize("cca", [False, True])
def test_a_token_that_a_cache_has_no_slot_for_is_refused(cca):
    model, tokens = make(depth=1, block=BlockConfig(cca=cca)), jnp.ones((1, 4), jnp.int32)
    at = lambda first, real=4: Where(*((jnp.arange(4) < real)[None] * 1, first + jnp.arange(4)[None]))  # noqa: E731
    cache = model(tokens, at(0), cache=6).cache
    for run in (lambda: model(tokens, at(4), cache=cache), lambda: model(tokens, at(3), cache=np.int64(6))):
        with pytest.raises(UserError, match="where.positions = [67]: the cache holds the positions 0 to 5"):
            run()
    left = Where(jnp.asarray([[0, 0, 1, 1]]), jnp.asarray([[0, 0, 0, 1]]))
    with pytest.raises(UserError, match="where.segments = .*padding behind") if cca else contextlib.nullcontext():
        model(tokens, left, cache=6)
    model(tokens, at(2), cache=cache)
    model(tokens, at(4, 2), cache=cache)  # padding has no position
    jax.eval_shape(lambda where: model(tokens, where, cache=cache).hidden, at(4))  # not known


def test_selected_tokens_may_stand_at_any_position():
    model = make(depth=1, mod=ModConfig(rate=(0.5,), skip="attention", kv="selected"))
    far = Where(jnp.ones((1, 4), jnp.int32), 100 + jnp.arange(4)[None])
    model(jnp.ones((1, 4), jnp.int32), far, cache=4, causal=True, cuts=jnp.zeros(2))


def test_a_scheme_may_be_named_and_what_does_not_fit_is_refused():
    config = tiny.model_config(positions="learned")
    for given in ("nag", type(NAG), nagjax.NAG):
        model = nnx.eval_shape(lambda given=given: Transformer(config, given, nnx.Rngs(0)))
        assert model.scheme == NAG
    for shape in ((3,), (1, config.context + 1)):
        with pytest.raises(UserError, match="tokens = "):
            make(positions="learned")(jnp.zeros(shape, jnp.int32))
    typed, row = make(token_types=2), jnp.zeros((1, 3), jnp.int32)
    for types, said in (
        ([[0, 1, 2]], "types = 2: the model has the types 0 to 1"),
        ([[-1, 0, 0]], "types = -1"),
        ([[0, 1]], r"types = \(1, 2\): give one for each token"),
    ):
        with pytest.raises(UserError, match=said):
            typed(row, types=jnp.array(types))
    far = Where(jnp.ones_like(row), row + jnp.array([0, 1, config.context]))
    with pytest.raises(UserError, match=f"positions = {config.context}: .* 0 to {config.context - 1}"):
        make(positions="learned")(row, far)
    make()(row, far)  # rotary
    for given, said in (
        (jnp.full((1, 2), config.vocab), f"the ids 0 to {config.vocab - 1}"),
        (np.array([[0, -1]]), "tokens = -1"),
        (jnp.ones((1, 2)), "tokens = 'float32': give token ids"),
        ([[1, 2], [3]], "rows of one length"),
    ):
        with pytest.raises(UserError, match=said):
            make()(given)
    with pytest.raises(UserError, match="progress = 5"):
        make()(jnp.zeros((1, 2), jnp.int32), progress=5)
    assert make()([[1, 2, 3]]).hidden.shape == (1, 3, config.width)
    with pytest.raises(UserError, match="did you mean 'nag'"):
        make("nagg")
    tokens = jnp.zeros((2, 4), jnp.int32)
    for where in (Where.whole(1, 4), Where(jnp.ones((2, 4)), jnp.arange(4))):
        with pytest.raises(UserError, match="where.* = .*give one for each token"):
            make()(tokens, where)
