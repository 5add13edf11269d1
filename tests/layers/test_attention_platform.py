"""Which implementation "auto" attention chooses on other machines, and what cuDNN is given."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nagjax.errors import UserError
from nagjax.layers import cudnn
from nagjax.layers.attend import _best, attend
from nagjax.layers.platform import tracing_for
from nagjax.layers.where import Where
from pallas_kernels import shard_rows
from pallas_kernels.launch import gpu


@pytest.mark.parametrize(
    "platform, queries, keys, taken",
    [("tpu", 256, 256, "splash"), ("tpu", 128, 256, "splash"), ("tpu", 100, 100, "xla"), ("gpu", 256, 256, "cudnn")],
)
def test_the_platform_traced_for_decides(platform, queries, keys, taken):
    q, k = (jax.ShapeDtypeStruct((1, n, 4, 64), jnp.bfloat16) for n in (queries, keys))
    with tracing_for(platform):
        assert _best(q, k) == taken
    with tracing_for("tpu"):
        assert _best(q, k, causal=False) == "xla"
    assert _best(q, k) == "xla"  # this machine: a CPU


AMPERE, HOPPER = (SimpleNamespace(device_kind=f"NVIDIA {name}") for name in ("A100-SXM4-80GB", "H200"))
TURING = SimpleNamespace(device_kind="Tesla T4", compute_capability="7.5")


@pytest.mark.parametrize(
    "device, make, width, dtype, why",
    [
        (AMPERE, "cuda", 128, "bfloat16", None),
        (AMPERE, "cuda", 256, "bfloat16", "up to 128"),
        (HOPPER, "cuda", 256, "float16", None),
        (HOPPER, "cuda", 512, "bfloat16", "up to 256"),
        (HOPPER, "cuda", 60, "bfloat16", "multiples of 8"),
        (HOPPER, "cuda", 64, "float32", "takes bfloat16 on a GPU, not float32"),
        (TURING, "cuda", 64, "float16", "7.5; accepted: 8.0"),
        (
            SimpleNamespace(device_kind="AMD Instinct MI300X", compute_capability="gfx942"),
            "rocm",
            64,
            "bfloat16",
            "AMD",
        ),
    ],
)
def test_heads_that_cudnn_does_not_take_are_xla_s(device, make, width, dtype, why, monkeypatch):
    monkeypatch.setattr(gpu, "traced_gpus", lambda: [device])
    monkeypatch.setattr(cudnn, "here", lambda: make)
    x, where = jnp.zeros((1, 2, 1, width), dtype), Where.whole(1, 2)
    with tracing_for("gpu"):
        assert _best(x, x) == ("xla" if why else "cudnn")
        if why:
            with pytest.raises(UserError, match=f"attention = 'cudnn': .*{why}.* choose auto or xla"):
                attend(x, x, x, where, where, "cudnn")


def test_cudnn_has_each_device_s_own_sequences_and_heads(monkeypatch):
    """Where heads of keys cannot be split as those of queries are, which JAX's rule for cuDNN refuses, none are."""
    mesh, seen = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor")), []
    own = jax.nn.dot_product_attention

    def attention(q, k, v, *, mask, implementation):
        if implementation == "cudnn":
            seen.append((q.shape, k.shape, mask.shape))
        return own(q, k, v, mask=mask)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    monkeypatch.setattr(cudnn, "refusal", lambda width, dtype: None)
    noise, where = np.random.default_rng(0), Where.whole(4, 6)
    draw = lambda heads: jnp.asarray(noise.normal(size=(4, 6, heads, 8)), jnp.float32)  # noqa: E731
    for heads, kept in ((2, 8), (4, 2)):
        q, k, v = draw(8), draw(heads), draw(heads)
        run = lambda q, k, v: attend(q, k, v, where, where, "cudnn")  # noqa: E731
        got = jax.jit(shard_rows(run, mesh, P("data")))(q, k, v)
        np.testing.assert_allclose(got, attend(q, k, v, where, where, "xla"), rtol=1e-5, atol=1e-5)
        assert seen.pop() == ((2, 6, kept, 8), (2, 6, heads * kept // 8, 8), (2, 1, 6, 6))


@pytest.mark.parametrize("queries, keys", [(103, 128), (127, 127), (64, 65), (1, 1)])
def test_odd_numbers_of_tokens_train_by_cudnn(queries, keys, monkeypatch):
    """By what JAX checks when it traces; values by XLA in cuDNN's place."""
    monkeypatch.setattr(jax_cudnn, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(jax_cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(jax_cudnn, "is_cuda_compute_capability_equal", lambda capability: False)
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(2, n, 2, 8)) / 4, jnp.bfloat16) for n in (queries, keys, keys))
    rows = lambda n: Where(*(jnp.broadcast_to(x, (2, n)) for x in (1, jnp.arange(n) + keys - n)))  # noqa: E731
    loss = lambda *x, taken: jnp.sum(attend(*x, rows(queries), rows(keys), taken).astype(jnp.float32) ** 2)  # noqa: E731
    by = {name: jax.value_and_grad(functools.partial(loss, taken=name), argnums=(0, 1, 2)) for name in ("cudnn", "xla")}
    with tracing_for("gpu"):
        gradients = jax.eval_shape(by["cudnn"], q, k, v)[1]
        assert [g.shape for g in gradients] == [x.shape for x in (q, k, v)]
        own = jax.nn.dot_product_attention
        monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, implementation, **more: own(*x, **more))
        found = by["cudnn"](q, k, v)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=2e-2), found, by["xla"](q, k, v))
