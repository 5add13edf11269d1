"""Time and FLOPs of reading and writing: the tokens that ran are counted as in a loop over tokens."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.cli import main
from nagjax.errors import UserError
from nagjax.generate import batching
from nagjax.layers.where import Where
from nagjax.measure.generation_times import Generation, generation_times
from nagjax.measure.routing_times import compared, told
from nagjax.measure.sampling_times import Racer, SamplingTimes, forward_flops
from nagjax.measure.step_times import CompileTimes, StepTimes
from nagjax.mod import ModConfig
from nagjax.runs.opening import open_run

SHAPE = "--depth 2 --width 16 --heads 2 --context 96 --steps 4 --batch 8".split()
PROMPTS = ("def f(x):", "a", "for i in range")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("generation") / "half"
    assert main(["train", *SHAPE, "--mod.rate", "0.5", "--out", str(out)]) == 0
    return open_run(out)


def test_who_ran_is_counted_over_the_tokens_that_were_read(run):
    ids = [row.tolist() for row in run.tokenizer.encode_batch(list(PROMPTS))]
    generation, ran = Generation(run, ids, 5), []
    for prompt, new in zip(ids, generation.written(), strict=True):
        row = jnp.asarray([(prompt + new)[:-1]])  # alone, without filler
        options = {"cuts": run.mod["cuts"], "causal": True, "mapped": True, "progress": run.progress}
        ran.append(np.asarray(run.model(row, Where.whole(*row.shape), **options).paths["ran"])[:, 0])
    counted = np.concatenate(ran, axis=1).mean(1).reshape(-1, 2)
    np.testing.assert_allclose(generation.executed(), counted, atol=1e-7)


def test_a_run_that_skips_is_compared_with_itself_run_densely(run):
    found = generation_times(run, PROMPTS, 5, rounds=1)
    assert set(found["tokens_per_second"]) == {"routed", "dense"} and 0 < found["executed"] < 1
    saved = (1 - found["time_ratio"]) / (1 - found["flops_ratio"])
    assert found["time_saved_over_flops_saved"] == pytest.approx(saved) and 0.4 < found["flops_ratio"] < 1


def test_flops_are_those_of_the_slots_that_the_cache_has(run, monkeypatch):
    seen, read = set(), batching.read
    monkeypatch.setattr(
        batching, "read", lambda *given, slots, **more: seen.add(slots) or read(*given, slots=slots, **more)
    )
    ratios, executed = [], None
    for tokens in (5, 40):
        found = generation_times(run, PROMPTS, tokens, rounds=1)
        ids = [row.tolist() for row in run.tokenizer.encode_batch(list(PROMPTS))]
        (slots,), executed = seen, Generation(run, ids, tokens).executed()
        flops = [forward_flops(own, slots, share) for own, share in ((run.blueprint, executed), (dense(run), None))]
        assert found["flops_ratio"] == pytest.approx(flops[0] / flops[1])
        assert slots < run.config.model.context or tokens == 40
        seen.clear()
        ratios.append(flops[1])
    assert ratios[0] < ratios[1]


def dense(run):
    return run.routed(ModConfig()).blueprint


def test_where_no_flops_are_saved_no_share_of_them_is_told():
    found = compared({"dense": [1.0], "routed": [1.1]}, {"dense": 2.0, "routed": 2.0})
    assert found["time_saved_over_flops_saved"] is None
    assert told(found) == "FLOPs 1.000 x, time 1.100 x dense: no FLOPs are saved"


def test_nobody_skips_where_every_cut_is_below_every_score(run):
    cuts = jnp.full_like(run.mod["cuts"], -jnp.inf)
    opened = run.routed(run.config.model.mod, cuts)
    assert Generation(opened, [[1, 2, 3], [4]], 4).executed().tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("schemes", lambda: StepTimes(schemes=())),
        ("batch", lambda: StepTimes(batch=3)),
        ("batch", lambda: CompileTimes(batch=3)),
        ("schemes", lambda: CompileTimes(schemes=())),
        ("deep", lambda: CompileTimes(shallow=4, deep=4, batch=8)),
    ],
)
def test_what_cannot_be_timed_is_refused(field, make):
    with pytest.raises(UserError) as refused:
        make()
    assert refused.value.field == field


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("kv", ["all", "selected"])
def test_who_ran_is_counted_over_the_tokens_that_were_timed(phase, kv):
    """By a loop that reads whole contexts and writes on, token by token."""
    bench = SamplingTimes(kv=kv, depth=2, width=16, batch=4, context=32, rounds=1, steps=24, phase=phase)
    texts = np.random.default_rng(0).integers(0, 256, (4, bench.slots), dtype=np.int32)
    racer = Racer(bench, bench.mod, texts)
    racer.seconds(1)
    model = nnx.merge(racer.graph, racer.params)
    given = {"cuts": racer.given.cuts, "causal": True, "mapped": True}
    output = model(texts[:, :32], Where.whole(4, 32), cache=model.empty_cache(4, bench.slots), **given)
    ran, written = [output.paths["ran"]], []
    if phase == "decode":
        ran = []
        for at in range(32, 32 + bench.steps):
            written.append(jnp.argmax(model.logits(output)[:, -1:], axis=-1))
            where = Where(jnp.ones((4, 1), jnp.int32), jnp.full((4, 1), at))
            output = model(written[-1], where, cache=output.cache, **given)
            ran.append(output.paths["ran"])
        np.testing.assert_array_equal(racer.written, jnp.concatenate(written, axis=1))
    counted = np.concatenate(ran, axis=2).mean((1, 2)).reshape(-1, 2)
    np.testing.assert_allclose(racer.executed(), counted, atol=1e-7)
    assert racer.blueprint.config.model.context == bench.slots == 32 + (24 if phase == "decode" else 0)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_bench_mod_times_a_phase(phase, tmp_path, capsys):
    small = "--depth 2 --width 16 --context 64 --batch 8 --rounds 1 --steps 4 --out".split()
    assert main(["bench", "mod", "--phase", phase, *small, str(tmp_path / "mod.json")]) == 0
    result = json.loads((tmp_path / "mod.json").read_text())["results"]
    assert "of the FLOPs saved is time saved" in capsys.readouterr().out
    assert 0 < result["executed"] < 1 and 0.3 < result["flops_ratio"] < 1
