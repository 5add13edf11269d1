"""Time and FLOPs of reading and writing: the tokens that ran are counted as in a loop over tokens."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from nagjax.cli import main
from nagjax.data.tokenizer import ByteTokenizer
from nagjax.errors import UserError
from nagjax.generate import batching
from nagjax.layers.where import Where
from nagjax.measure import generation_times as generation_module
from nagjax.measure import step_times
from nagjax.measure.generation_times import Generation, generation_times
from nagjax.measure.routing_times import compared, told
from nagjax.measure.sampling_times import Racer, SamplingTimes
from nagjax.measure.step_times import CompileTimes, StepTimes, compile_times
from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig, TrainConfig
from nagjax.runs.facts import model_costs
from nagjax.runs.opening import OpenRun
from tests.tiny import blueprint, fresh, moved

PROMPTS = ("def f(x):", "a", "for i in ")  # of two lengths, for each of which a program is compiled


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """At the end of a training that has moved its parameters anyhow; cut where half of the tokens of some text skip."""
    shape = {"depth": 2, "width": 16, "heads": 2, "context": 96, "vocab": ByteTokenizer().vocab_size}
    model = ModelConfig(**shape, mod=ModConfig(rate=(0.5,)))
    plan = blueprint(RunConfig(find_scheme("nag")(), model, train=TrainConfig(steps=4, batch=8)))
    params, text = moved(fresh(plan).params), np.random.default_rng(0).integers(0, 256, (4, 96), dtype=np.int32)
    cuts = jax.jit(lambda params: plan.model(params)(text, progress=1.0).routing["cut"])(params)
    return OpenRun(tmp_path_factory.mktemp("half"), plan, 4, params, {"cuts": cuts}, ByteTokenizer())


def test_who_ran_is_counted_over_the_tokens_that_were_read(run):
    ids = [row.tolist() for row in run.tokenizer.encode_batch(list(PROMPTS))]
    generation, ran = Generation(run, ids, 5), []
    options = {"cuts": run.mod["cuts"], "causal": True, "mapped": True, "progress": run.progress}

    @jax.jit
    def look(params, row):
        return run.blueprint.model(params)(row, Where.whole(*row.shape), **options).paths["ran"]

    for prompt, new in zip(ids, generation.written(), strict=True):
        row = jnp.asarray([(prompt + new)[:-1]])  # alone, without filler
        ran.append(np.asarray(look(run.params, row))[:, 0])
    counted = np.concatenate(ran, axis=1).mean(1).reshape(-1, 2)
    np.testing.assert_allclose(generation.executed(), counted, atol=1e-7)


def test_a_run_that_skips_is_compared_with_itself_run_densely(run):
    found = generation_times(run, PROMPTS, 5, rounds=1)
    assert set(found["tokens_per_second"]) == {"routed", "dense"} and 0 < found["executed"] < 1
    saved = (1 - found["time_ratio"]) / (1 - found["flops_ratio"])
    assert found["time_saved_over_flops_saved"] == pytest.approx(saved) and 0.4 < found["flops_ratio"] < 1


def test_tokens_are_those_of_all_rows_and_what_is_saved_is_a_share_of_what_could_be(run, monkeypatch):
    """Five tokens of each of three rows; a quarter of the FLOPs is saved, and in most rounds half of the time."""
    times = {"dense": [2.0, 4.0, 8.0], "routed": [1.0, 3.0, 4.0]}
    monkeypatch.setattr(generation_module, "race", lambda *given: times)
    monkeypatch.setattr(Generation, "executed", lambda self: np.full((2, 2), 0.5))
    costs = lambda *given, slots, shares: SimpleNamespace(forward=4.0 if shares is None else 3.0)  # noqa: E731
    monkeypatch.setattr(generation_module, "model_costs", costs)
    found = generation_times(run, PROMPTS, 5)
    assert found["tokens_per_second"] == {"dense": 5 * 3 / 4.0, "routed": 5 * 3 / 3.0}
    assert found["milliseconds"] == {"dense": 4000.0, "routed": 3000.0} and found["executed"] == 0.5
    assert (found["flops_ratio"], found["time_ratio"], found["time_saved_over_flops_saved"]) == (0.75, 0.5, 2.0)


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
        shares = (run.blueprint, executed), (dense(run), None)
        flops = [model_costs(own, slots=slots, shares=share).forward for own, share in shares]
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
    slower = compared({"dense": [1.0], "routed": [1.1]}, {"dense": 4.0, "routed": 3.0})
    assert told(slower) == "FLOPs 0.750 x, time 1.100 x dense: no time is saved"


def test_nobody_skips_where_every_cut_is_below_every_score(run):
    cuts = jnp.full_like(run.mod["cuts"], -jnp.inf)
    opened = run.routed(run.config.model.mod, cuts)
    assert Generation(opened, [[1, 2, 3], [4]], 4).executed().tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("schemes", lambda: StepTimes(schemes=())),
        ("schemes", lambda: StepTimes(schemes=("plain", "nag", "plain"))),
        ("schemes", lambda: CompileTimes(schemes=("plain", "nga"))),
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


def test_no_compilation_is_timed_that_a_cache_has(tmp_path, monkeypatch):
    """With a cache on disk, which a program as small as this one goes into."""
    program = jax.jit(lambda state, batch: state * 3.0 + batch)
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    facts = dict.fromkeys(("device", "devices", "cpu", "versions", "commit", "date"))
    plan = SimpleNamespace(abstract=lambda: jax.ShapeDtypeStruct((3,), jnp.float32))
    monkeypatch.setattr(step_times, "blueprint_of", lambda *shape: plan)
    monkeypatch.setattr(step_times, "run_facts", lambda blueprint: facts)
    monkeypatch.setattr(step_times, "abstract_batch", lambda blueprint: blueprint.abstract())
    monkeypatch.setattr(step_times, "jit_train_step", lambda blueprint: program)
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        found = compile_times(CompileTimes(schemes=("plain",), batch=8, rounds=1))
        assert found["results"]["plain"]["ratio"] > 0 and not list(tmp_path.iterdir())
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        jax.clear_caches()
        program.lower(plan.abstract(), plan.abstract()).compile()
        assert list(tmp_path.iterdir()), "what is compiled later is kept again"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.parametrize("command", ["step", "compile", "mod"])
def test_a_place_for_the_result_is_looked_at_first(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step_times, "blueprint_of", None)  # nothing is made
    for out in (tmp_path, "/dev/null/times.json"):
        assert main(["bench", command, "--batch", "8", "--out", str(out)]) == 2
        assert "nagjax: error: out = " in capsys.readouterr().err


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("kv", ["all", "selected"])
def test_who_ran_is_counted_over_the_tokens_that_were_timed(phase, kv):
    """By a loop that reads whole contexts and writes on, token by token."""
    bench = SamplingTimes(kv=kv, depth=2, width=16, batch=4, context=32, rounds=1, steps=24, phase=phase)
    texts = np.random.default_rng(0).integers(0, 256, (4, bench.slots), dtype=np.int32)
    racer = Racer(bench, bench.mod, texts)
    racer.seconds(1)
    given = {"cuts": racer.given.cuts, "causal": True, "mapped": True}

    @jax.jit
    def read(params, tokens, where, cache):
        model = nnx.merge(racer.graph, params)
        output = model(tokens, where, cache=cache, **given)
        return jnp.argmax(model.logits(output)[:, -1:], axis=-1), output.cache, output.paths["ran"]

    cache = nnx.merge(racer.graph, racer.params).empty_cache(4, bench.slots)
    following, cache, own = read(racer.params, texts[:, :32], Where.whole(4, 32), cache)
    ran, written = [own], []
    if phase == "decode":
        ran = []
        for at in range(32, 32 + bench.steps):
            written.append(following)
            where = Where(jnp.ones((4, 1), jnp.int32), jnp.full((4, 1), at))
            following, cache, own = read(racer.params, following, where, cache)
            ran.append(own)
        np.testing.assert_array_equal(racer.written, jnp.concatenate(written, axis=1))
    counted = np.concatenate(ran, axis=2).mean((1, 2)).reshape(-1, 2)
    np.testing.assert_allclose(racer.executed(), counted, atol=1e-7)
    assert racer.blueprint.config.model.context == bench.slots == 32 + (24 if phase == "decode" else 0)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_bench_mod_times_a_phase(phase, tmp_path, capsys):
    small = "--depth 2 --width 16 --context 64 --batch 8 --rounds 1".split()
    steps = ["--steps", "4"] if phase == "decode" else []
    assert main(["bench", "mod", "--phase", phase, *small, *steps, "--out", str(tmp_path / "mod.json")]) == 0
    result = json.loads((tmp_path / "mod.json").read_text())["results"]
    assert told(result) in capsys.readouterr().out
    assert 0 < result["executed"] < 1 and 0.3 < result["flops_ratio"] < 1
