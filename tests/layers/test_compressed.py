"""Compressed convolutional attention against its equations, in every pass, on a mesh, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.generate.sample import generate
from nagjax.layers.compressed import CompressedAttention
from nagjax.layers.config import BlockConfig
from nagjax.layers.parameters import Scales
from nagjax.layers.platform import tracing_for
from nagjax.layers.where import Where
from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.residual.registry import find_scheme, schemes
from nagjax.train.state import factors
from tests import tiny
from tests.meshes import check_losses
from tests.streams import one_per_stream
from tests.tiny_models import full_logits, make_model, stepwise_logits
from tests.tolerance import assert_close

CCA = BlockConfig(cca=True, head_width=4)
SHAPE = dict(depth=1, width=24, heads=4, kv_heads=2, context=16, dtype="float32", block=CCA)
EPSILON = 64 * np.finfo(np.float32).eps  # sums of at most 24 products, some ten behind one another


def drawn(config: ModelConfig, seed: int = 0) -> CompressedAttention:
    """Every parameter away from its initial value."""
    module = CompressedAttention(config, Scales(), nnx.Rngs(seed))
    for i, leaf in enumerate(jax.tree.leaves(nnx.state(module), is_leaf=lambda own: isinstance(own, nnx.Variable))):
        leaf[...] = leaf[...] + 0.3 * jax.random.normal(jax.random.key(i), leaf.shape)
    return module


def formula(module: CompressedAttention, x: np.ndarray) -> np.ndarray:
    """One document [T, D], token by token, in float64."""
    wide = lambda own: np.asarray(own[...], np.float64)  # noqa: E731
    width, heads = module.config.head_width, {"query": module.config.heads, "key": module.config.kv_heads}
    group = heads["query"] // heads["key"]
    p = {name: x @ wide(getattr(module, name)) for name in ("query", "key", "value")}
    found = {name: np.zeros((len(x), count, width)) for name, count in heads.items()}
    for name, conv in (("query", module.query_convolution), ("key", module.key_convolution)):
        a, b, mix, e = (wide(own) for own in (conv.taps, conv.taps_bias, conv.mix, conv.mix_bias))
        c = [a[0] * (p[name][t - 1] if t else 0.0) + a[1] * p[name][t] + b for t in range(len(x))]
        for t in range(len(x)):
            pair = (c[t - 1] if t else b), c[t]
            for head in range(heads[name]):
                own = slice(head * width, (head + 1) * width)
                found[name][t, head] = np.concatenate([part[own] for part in pair]) @ mix[head] + e[own]
    first = {name: p[name].reshape(len(x), count, width) for name, count in heads.items()}
    for head in range(heads["query"]):
        found["query"][:, head] += (first["query"][:, head] + first["key"][:, head // group]) / 2
    for head in range(heads["key"]):
        mean = np.mean(first["query"][:, head * group : (head + 1) * group], axis=1)
        found["key"][:, head] += (mean + first["key"][:, head]) / 2
    half = p["value"].shape[1] // 2
    late = np.concatenate([np.zeros((1, half)), p["value"][:-1, half:]])
    values = np.concatenate([p["value"][:, :half], late], axis=1).reshape(len(x), heads["key"], width)
    angles = np.arange(len(x))[:, None] * module.config.rope_base ** (-np.arange(width // 2) / (width // 2))
    turn = np.exp(1j * angles)

    def placed(y):
        y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + module.config.block.qk_epsilon)
        z = (y[..., : width // 2] + 1j * y[..., width // 2 :]) * turn[:, None]
        return np.concatenate([z.real, z.imag], axis=-1)

    q, k = placed(found["query"]), placed(found["key"]) * wide(module.temperature)[:, None]
    mixed = np.zeros((len(x), heads["query"], width))
    for t in range(len(x)):
        for head in range(heads["query"]):
            scores = k[: t + 1, head // group] @ q[t, head] / np.sqrt(width)
            shares = np.exp(scores - scores.max())
            mixed[t, head] = (shares / shares.sum()) @ values[: t + 1, head // group]
    return mixed.reshape(len(x), -1) @ wide(module.out)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_packed_documents_get_what_the_equations_say_of_each(platform):
    module = drawn(ModelConfig(**SHAPE))
    x = np.random.default_rng(0).normal(size=(1, 16, 24))
    segments = np.array([[1] * 5 + [2] * 1 + [3] * 8 + [0] * 2], np.int32)
    positions = np.array([[*range(5), 0, *range(8), 0, 1]], np.int32)
    run = jax.jit(lambda x, *where: module(x, Where(*where))[0])
    with tracing_for(platform):
        update = run(jnp.asarray(x, jnp.float32), segments, positions)
    for begin, end in ((0, 5), (5, 6), (6, 14)):
        expected = formula(module, x[0, begin:end])
        np.testing.assert_allclose(update[0, begin:end], expected, atol=EPSILON * np.max(np.abs(expected)))


@pytest.mark.parametrize("name", one_per_stream())
def test_a_pass_with_the_cache_computes_what_a_pass_without_it_computes(name):
    model = make_model(schemes()[name](), block=BlockConfig(cca=True, window=5))
    rows = np.random.default_rng(0).integers(0, 61, (3, 13)).tolist()
    full, stepwise = full_logits(model, rows), stepwise_logits(model, rows)
    assert np.std(full) > 0.1
    assert_close(stepwise, full, **tiny.FORWARD)


def test_prompts_of_different_lengths_are_written_on_as_full_passes_would():
    model = make_model(schemes()["nag"](), block=BlockConfig(cca=True))
    prompts = [[5, 1, 60, 3, 3, 17, 8], [9], [2, 40]]
    written = generate(model, prompts, tokens=9, temperature=0.0)
    rows = [prompt + new for prompt, new in zip(prompts, written, strict=True)]
    for prompt, new, logits in zip(prompts, written, full_logits(model, rows), strict=True):
        assert np.argmax(logits, axis=-1)[len(prompt) - 1 : -1].tolist() == new


@pytest.mark.parametrize("change", [{}, {"residual_dtype": "float32", "dtype": "bfloat16"}], ids=["same", "narrow"])
def test_tokens_may_skip_the_mlp(change):
    """Attention, which no token skips, is still run in order where other sublayers are routed."""
    routed = dict(mod=ModConfig(rate=(0.5,), skip="mlp")) | change
    model, plain = (make_model(schemes()["nag"](), block=BlockConfig(cca=cca), **routed) for cca in (True, False))
    tokens = np.random.default_rng(0).integers(0, 61, (2, 12))
    found, other = (jax.jit(lambda tokens, own=own: own.logits(own(tokens)))(tokens) for own in (model, plain))
    assert jnp.all(jnp.isfinite(found)) and jnp.max(jnp.abs(found - other)) > 0.1


def test_a_mesh_of_all_axes_gives_the_losses_of_one_device():
    config = tiny.run_config(find_scheme("nag")(), depth=2, kv_heads=2, block=dataclasses.replace(CCA, head_width=4))
    check_losses(config, dict(data=2, tensor=2, sequence=2))


def test_the_weights_that_probes_read_are_those_of_the_convolved_queries_and_keys():
    module, where = drawn(ModelConfig(**SHAPE)), Where.whole(1, 9)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, 24)), jnp.float32)

    @jax.jit
    def both(x):
        q, k = module.queries_keys(x, where)
        shares = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, 2, axis=2)) / 2 + jnp.log(jnp.tri(9)))
        values = jnp.repeat(module.vectors(x, where).known.values, 2, axis=2)
        return module(x, where)[0], jnp.einsum("bhts,bshd->bthd", shares, values).reshape(1, 9, -1) @ module.out[...]

    update, mixed = both(x)
    np.testing.assert_allclose(update, mixed, atol=EPSILON * float(jnp.max(jnp.abs(mixed))))


def test_its_rate_under_mup_follows_what_it_sums_over():
    """Its convolutions sum over one head's features, as many at every width."""
    config = tiny.run_config(
        find_scheme("plain")(), width=64, heads=4, kv_heads=2, block=CCA, parametrization="mup", base_width=16
    )
    own = factors(tiny.blueprint(config))["blocks"]["attention"]["branch"]
    assert own["query_convolution"]["mix"].rate == own["temperature"].rate == 1.0
    assert own["query"].rate == own["out"].rate == 0.25


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("mod.skip", dict(mod=ModConfig(rate=(0.5,)))),
        ("qk_norm", dict(qk_norm=False)),
        ("block.qk_gain", dict(block=dataclasses.replace(CCA, qk_gain="head"))),
        ("block.biases", dict(block=dataclasses.replace(CCA, biases=("qkv",)))),
        ("kv_heads", dict(kv_heads=1, positions="learned", block=dataclasses.replace(CCA, head_width=3))),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(field, changes):
    with pytest.raises(UserError) as error:
        ModelConfig(**SHAPE | changes)
    assert error.value.field == field and "block.cca" in error.value.fix
