"""Plans by the real compilers. Needs the wheels of the `aot` extra."""

import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nagjax.cli import main
from nagjax.generate.decode import Pass, read
from nagjax.layers.attend import attend
from nagjax.layers.platform import tracing_for
from nagjax.layers.where import Where
from nagjax.model.config import ModelConfig
from nagjax.model.transformer import Transformer
from nagjax.plan.topology import missing, parse
from nagjax.residual import find_scheme
from pallas_kernels.aot.targets import ENVIRONMENT, TARGETS, devices

SMALL = "--scheme plain --depth 2 --width 128 --heads 1 --context 128 --vocab 256".split()


def planned(tmp_path, topology, *args):
    if reason := missing(parse(topology).chip):
        pytest.skip(f"{reason} is not installed")
    out = tmp_path / "plan.json"
    assert main(["plan", *SMALL, "--topology", topology, *args, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def products(batch, depth=2, width=128, tokens=128, vocab=256):
    """FLOPs of a step's weights: three times the forward pass."""
    hidden = 344  # 8/3 of the width in eights
    return 3 * 2 * batch * tokens * (depth * (4 * width**2 + 3 * width * hidden) + vocab * width)


def test_a_tpu_slice(tmp_path):
    found = planned(tmp_path, "v5e:2x2", "--batch", "8", "--dollars-per-hour", "1")
    assert found["fits"] and found["choices"]["attention"] == "splash"
    assert {name.partition("_segmented")[0] for name in found["kernels"]} >= {"splash_mha_fwd", "splash_mha_dkv"}
    attention = 9 * 2 * 128 * 128 * 128 * 2 * 2  # 9 products, one block each, of 2 sequences and 2 layers
    assert found["flops"] == pytest.approx(products(2) + attention, rel=0.02)
    assert found["collectives"]["all-gather"]["count"] >= 2 and found["sent"] > 0
    memory = found["memory"]
    state = memory["parameters"] + memory["optimizer"]
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], rel=0.01)
    assert state < memory["peak"] < memory["capacity"]
    assert found["bound"]["seconds"] > 0 and found["dollars_per_billion_tokens"] > 0


@pytest.mark.parametrize("data, fsdp, share", [(1, 8, 0.05), (2, 4, 0.3)])
def test_gradients_are_summed_where_their_parameters_live(tmp_path, data, fsdp, share):
    """Under fsdp they are scattered (as reduce-scatters, or as rings beside the products); only shards are all-reduced,
    over copies of the model. All-reducing whole ones would send 7/4 of their bytes."""
    args = f"--batch 8 --mesh.data {data} --mesh.fsdp {fsdp} --remat block".split()
    found = planned(tmp_path, "v5e:2x4", *args)
    gradients = 4 * found["parameters"]
    assert found["collectives"]["all-reduce"]["sent"] < share * gradients
    assert found["collectives"]["reduce-scatter"]["count"] >= 1
    assert found["involuntary_rematerializations"] == 0


def test_a_gpu_with_tokamax_s_attention(tmp_path):
    """Neither scores nor a mask in memory."""
    pytest.importorskip("tokamax", reason="the extra tokamax is not installed")
    args = "--batch 8 --context 2048 --heads 2 --remat block".split()
    found, other = (planned(tmp_path, "h200x8", *args, "--attention", name) for name in ("tokamax", "xla"))
    assert found["choices"]["attention"] == "tokamax" and found["kernels"]["tokamax_attention"] == 4 * 2
    scores = 2 * 2 * 2048**2  # of one layer, in bfloat16
    assert other["memory"]["peak"] - found["memory"]["peak"] > scores
    attention = (2 + 2 + 7) * 2 * 128 * 2048 * (2048 + 64) / 2 * 2  # forward twice and backward, 2 layers
    assert found["flops"] == pytest.approx(4 / 3 * products(1, tokens=2048) + attention, rel=0.1)


def test_a_split_sequence(tmp_path):
    """Splash attention takes a part of the queries, and nothing but keys and values is gathered for it."""
    args = "--batch 4 --context 512 --mesh.data 2 --mesh.fsdp 2 --mesh.sequence 2 --remat block".split()
    found = planned(tmp_path, "v5e:2x4", *args)
    assert found["fits"] and found["choices"]["attention"] == "splash"
    assert {name.partition("_segmented")[0] for name in found["kernels"]} >= {"splash_mha_fwd", "splash_mha_dkv"}
    assert found["involuntary_rematerializations"] == 0


def test_chosen_queries_on_a_tpu(monkeypatch):
    """Mixture-of-Depths: nothing of queries times keys in memory, forward or backward."""
    if reason := missing(parse("v5e:2x2").chip):
        pytest.skip(f"{reason} is not installed")
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    batch, queries, keys, heads = 8, 1000, 2048, 8  # more than fits on the chip
    here = jax.sharding.SingleDeviceSharding(devices(TARGETS["v5e"])[0])
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=here)  # noqa: E731
    q, k = (of((batch, tokens, heads, 128), jnp.bfloat16) for tokens in (queries, keys))
    chosen, whole = (Where(*[of((batch, tokens), jnp.int32)] * 2) for tokens in (queries, keys))

    def gradients(q, k, v, chosen, whole):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, chosen, whole), q, k, v)
        return pull(out)

    with tracing_for("tpu"):
        program = jax.jit(gradients).lower(q, k, k, chosen, whole).compile()
    assert all(f"splash_mha_{kernel}" in program.as_text() for kernel in ("fwd", "dq", "dkv"))
    scores = batch * heads * queries * keys * 2  # in bfloat16
    assert program.memory_analysis().temp_size_in_bytes < scores


def test_prompts_are_read_without_scores_in_memory(monkeypatch):
    """By the attention of training."""
    if reason := missing(parse("v5e:2x2").chip):
        pytest.skip(f"{reason} is not installed")
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    batch, tokens, slots, heads = 4, 2048, 2176, 4
    config = ModelConfig(depth=2, width=512, heads=heads, context=slots, vocab=256, dtype="bfloat16")
    graph, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, find_scheme("plain")(), nnx.Rngs(0))))
    here = jax.sharding.SingleDeviceSharding(devices(TARGETS["v5e"])[0])
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=here)  # noqa: E731
    params = jax.tree.map(lambda x: of(x.shape, x.dtype), params)
    texts, lengths, given = of((batch, tokens), jnp.int32), of((batch,), jnp.int32), Pass(of((), jnp.float32), None)
    with tracing_for("tpu"):
        program = read.lower(params, texts, lengths, given, graph=graph, slots=slots, mesh=None).compile()
    assert "splash_mha_fwd" in program.as_text()
    scores = batch * heads * tokens * slots * 4  # of one layer
    assert program.memory_analysis().temp_size_in_bytes < scores


def test_the_stream_on_the_host(tmp_path):
    found = planned(tmp_path, "v5e:2x2", "--batch", "8", "--remat", "offload")
    stream = 2 * 2 * 128 * 128 * 2 * 2  # 2 blocks, 2 sequences, bfloat16, the stream and its normalised copy
    assert found["fits"] and found["memory"]["saved"] == 0 and found["memory"]["saved_on_host"] == stream


def test_a_run_too_large_for_its_slice(tmp_path, capsys):
    found = planned(tmp_path, "v5e:2x2", "--context", "4096", "--batch", "4096", "--vocab", "32768", "--remat", "dots")
    assert not found["fits"] and "bound" not in found
    assert found["memory"]["needed"] > found["memory"]["capacity"]
    assert any(advice.startswith("--accumulate") for advice in found["advice"])
    assert "does not fit" in capsys.readouterr().out


def test_a_gpu_box(tmp_path, capsys):
    found = planned(tmp_path, "h200x8", "--batch", "16")
    assert found["fits"] and found["choices"]["attention"] == "xla" and "cuDNN" in capsys.readouterr().out
    assert found["flops"] == pytest.approx(products(2) + 3 * 2 * 2 * 128 * 128 * 128 * 2 * 2, rel=0.05)
    assert found["collectives"] and found["moved"] > found["memory"]["parameters"]


@pytest.mark.parametrize("topology, package", [("v5e:2x2", None), ("h200x8", "tokamax")])
def test_dropless_experts_work_once_for_every_choice(tmp_path, topology, package):
    """As many FLOPs as the dense model's, whose MLP is as wide as the experts that a token runs together."""
    if package:
        pytest.importorskip(package, reason=f"the extra {package} is not installed")
    args = "--batch 8 --attention xla --hidden 384".split()
    dense = planned(tmp_path, topology, *args)
    sparse = planned(tmp_path, topology, *args, "--moe.experts", "8")
    router = 3 * 2 * 8 * 128 * 2 * 128 * 8  # a product and two gradients, of 2 blocks
    devices = 8 if package else 4
    assert sparse["flops"] - dense["flops"] == pytest.approx(router / devices, rel=0.2)
