"""Attention by tokamax's kernel: the stretches of keys that it is given, where it runs, and what it refuses. The kernel
itself is compiled in tests/aot, and compared with float32 on a device by `benchmarks/device.py`."""

import importlib.util
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nagjax.cli import main
from nagjax.errors import UserError
from nagjax.layers import flash
from nagjax.layers.attend import _best, attend
from nagjax.layers.platform import installed, tracing_for, warn_once
from nagjax.layers.where import Where, seen_mask
from nagjax.mod import ModConfig
from nagjax.residual.rows import take
from nagjax.runs.config import MeshConfig
from nagjax.train.distributed.mesh import make_mesh
from pallas_kernels.placement import shard_rows
from tests import tiny

BATCH, TOKENS = 8, 24


def packed() -> Where:
    batch = tiny.packed_batch(tokens=TOKENS, batch=BATCH)
    return Where(jnp.asarray(batch.segment_ids), jnp.asarray(batch.positions))


def some(where: Where, count: int) -> Where:
    """The tokens that a router might choose."""
    chosen = [np.sort(np.random.default_rng(row).permutation(TOKENS)[:count]) for row in range(BATCH)]
    return take(where, jnp.asarray(np.array(chosen)))


@pytest.mark.parametrize(("window", "causal"), [(None, True), (3, True), (None, False)])
@pytest.mark.parametrize("count", [TOKENS, 7])
def test_every_query_sees_its_stretch_of_keys_and_no_others(count, window, causal):
    keys = packed()
    queries = some(keys, count)
    first, end = flash.seen_keys(queries, keys, window, causal)
    place = np.arange(TOKENS)
    between = (np.asarray(first)[..., None] <= place) & (place < np.asarray(end)[..., None])
    np.testing.assert_array_equal(between, seen_mask(queries, keys, window, causal)[:, 0])
    assert first.dtype == end.dtype == jnp.int32 and np.all(np.asarray(end) > np.asarray(first))


class Stretches:
    """What tokamax's mask is made of here."""

    def __init__(self, *, k_start, k_end):
        self.first, self.end = k_start, k_end


def by_formula(q, k, v, *, mask: Stretches):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    place = jnp.arange(k.shape[1])
    seen = (mask.first[..., None] <= place) & (place < mask.end[..., None])
    shares = jax.nn.softmax(
        jnp.where(seen, jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5, -jnp.inf), axis=-1
    )
    return jnp.einsum("bhts,bshd->bthd", shares, v)


@pytest.mark.parametrize("axes", [{}, {"data": 2}, {"data": 1, "tensor": 2}, {"data": 1, "fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize("count", [TOKENS, 7])
def test_it_gets_whole_rows_on_every_mesh(monkeypatch, axes, count):
    monkeypatch.setattr(flash, "_kernel", lambda tile: (by_formula, Stretches))
    keys = packed()
    queries, noise = some(keys, count), np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(noise.normal(size=(BATCH, n, h, 8)), jnp.float32) for n, h in ((count, 4), (TOKENS, 2), (TOKENS, 2))
    )
    run = lambda q, k, v: attend(q, k, v, queries, keys, "tokamax", 5)  # noqa: E731
    size = int(np.prod(list(axes.values()))) if axes else 0
    if size:
        mesh = make_mesh(MeshConfig(**axes), jax.devices()[:size])
        run = shard_rows(run, mesh, P(("data", "fsdp")))
        q, k, v = (jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp")))) for x in (q, k, v))
    expected = attend(*map(jnp.asarray, jax.device_get((q, k, v))), queries, keys, "xla", 5)
    np.testing.assert_allclose(jax.jit(run)(q, k, v), expected, atol=64 * np.finfo(np.float32).eps)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    flash._kernel.cache_clear()
    q, where = jnp.zeros((1, 4, 2, 8)), Where.whole(1, 4)
    with pytest.raises(UserError, match=r"attention = 'tokamax'.*pip install -e '.\[tokamax\]'"):
        attend(q, q, q, where, where, "tokamax")
    flash._kernel.cache_clear()


def test_what_it_cannot_do_is_refused(tmp_path, capsys):
    q, where = jnp.zeros((1, 4, 2, 8)), Where.whole(1, 4)
    with pytest.raises(UserError, match="tokamax.*softcap"):
        attend(q, q, q, where, where, "tokamax", None, 2.0)
    with pytest.raises(UserError, match="attention = 'tokamax'.*--mod.kv all"):
        tiny.model_config(attention="tokamax", mod=ModConfig(rate=(0.5,), kv="selected"))
    tiny.model_config(attention="tokamax", mod=ModConfig(rate=(0.5,), kv="selected", skip="mlp"))
    command = ["train", "--attention", "tokamax", "--out", str(tmp_path / "run")]
    assert main(command) == 2 and "tokamax" in capsys.readouterr().err  # a CPU
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "gpu, dtype, width, tile",
    [
        ({"device_kind": "NVIDIA H200"}, jnp.bfloat16, 64, 128),
        ({"device_kind": "NVIDIA GH200 480GB", "compute_capability": "9.0"}, jnp.float16, 256, 64),
        ({"device_kind": "NVIDIA H100 80GB HBM3"}, jnp.float32, 64, None),
        ({"device_kind": "NVIDIA A100-SXM4-80GB", "compute_capability": "8.0"}, jnp.bfloat16, 64, None),
        ({"device_kind": "NVIDIA B200", "compute_capability": "10.0"}, jnp.bfloat16, 64, None),
        (None, jnp.bfloat16, 64, None),
    ],
)
def test_hopper_has_kernels_of_its_own_in_16_bits(monkeypatch, gpu, dtype, width, tile):
    monkeypatch.setattr(flash, "traced_gpus", lambda: [SimpleNamespace(**gpu)] if gpu else [])
    assert flash._hopper_tile(jnp.zeros((1, 4, 2, width), dtype)) == tile


HOPPER = SimpleNamespace(device_kind="NVIDIA H200")


@pytest.mark.parametrize(
    "gpu, rows, tokens, there, gaps, taken",
    [
        (HOPPER, 1, 32768, True, False, "tokamax"),  # 2 GiB
        (HOPPER, 1, 32768, False, False, "cudnn"),
        (HOPPER, 1, 32768, True, True, "cudnn"),
        (HOPPER, 8, 4096, True, False, "cudnn"),  # 256 MiB
        (SimpleNamespace(device_kind="NVIDIA A100-SXM4-80GB"), 1, 32768, True, False, "cudnn"),
    ],
)
def test_it_is_taken_where_cudnn_s_mask_would_be_large(monkeypatch, caplog, gpu, rows, tokens, there, gaps, taken):
    monkeypatch.setattr(flash, "traced_gpus", lambda: [gpu])
    missing = () if there else ("triton",)  # the package's own extra has it
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else object())
    installed.cache_clear()
    warn_once.cache_clear()
    q, k = (jax.ShapeDtypeStruct((rows, tokens, heads, 64), jnp.bfloat16) for heads in (16, 4))
    with tracing_for("gpu"):
        assert _best(q, k, gaps=gaps) == taken
    assert ("pip install -e '.[tokamax]'" in caplog.text) == (not there)
    installed.cache_clear()


def test_the_mask_is_a_device_s_own(monkeypatch):
    """Of 16 rows on 8 devices each has two."""
    monkeypatch.setattr(flash, "traced_gpus", lambda: [HOPPER])
    monkeypatch.setattr(flash, "tokamax_installed", lambda: True)
    x = jax.ShapeDtypeStruct((16, 16384, 2, 64), jnp.bfloat16)
    seen = []
    look = shard_rows(lambda: seen.append(_best(x, x)), make_mesh(MeshConfig()), P(("data", "fsdp")))
    with tracing_for("gpu"):
        look()
        x = jax.ShapeDtypeStruct((24, 16384, 2, 64), jnp.bfloat16)
        look()
    assert seen == ["cudnn", "tokamax"]  # 1 GiB, and half as much again
