"""What a routed token costs, against XLA's count of the compiled step."""

import dataclasses
import functools
import itertools
import math

import jax
import numpy as np
import pytest

from nagjax.layers.config import BlockConfig, LoRAConfig, MoEConfig, OtherBlocks
from nagjax.measure.routing_times import RoutingTimes, compiled_flops
from nagjax.mod import ModConfig, kept
from nagjax.mod.costs import costs, mod_rates
from nagjax.mod.deciders.predictor import HIDDEN_WIDTH
from nagjax.residual import find_scheme
from nagjax.residual.schemes import mhc
from nagjax.runs.facts import model_costs, parameters_by_part, run_facts
from nagjax.train.abstract_step import abstract_batch
from nagjax.train.step import train_step
from tests import tiny

SEQUENCES, TOKENS = 32, 128  # so many that the optimizer's work does not count; nothing is run
SHAPE = dict(width=512, heads=8, kv_heads=2, context=TOKENS, vocab=64)


def closed(bp) -> float:
    """Training FLOPs per token, of attention that computes all scores."""
    rules = bp.model(bp.abstract().params).mod
    return costs(bp.config.model, bp.parameters, rules.router.name, rules.decider.name, slots=TOKENS).train


@functools.cache
def counted(
    scheme: str, mod: ModConfig, moe: MoEConfig | None = None, block: BlockConfig | None = None
) -> tuple[float, float]:
    """Training FLOPs per token that a second block adds: XLA's count, and the closed form."""
    both = []
    for depth in (1, 2):
        bp = tiny.blueprint(
            tiny.run_config(
                find_scheme(scheme)(),
                train={"batch": SEQUENCES},
                depth=depth,
                mod=mod,
                moe=moe or MoEConfig(),
                block=block or BlockConfig(),
                attention="xla",  # a CPU's own takes the scores again in the backward pass
                **SHAPE,
            )
        )

        def step(state, batch, bp=bp):
            with jax.disable_jit():  # unrolled: XLA counts a loop's body once
                return train_step(bp)(state, batch)

        flops = jax.jit(step).lower(bp.abstract(), abstract_batch(bp)).cost_analysis()["flops"] / (SEQUENCES * TOKENS)
        both.append((flops, closed(bp)))
    return both[1][0] - both[0][0], both[1][1] - both[0][1]


@pytest.mark.parametrize(
    "scheme, mod",
    [
        ("nag", ModConfig(rate=(0.5,))),
        ("review", ModConfig(rate=(0.25,), skip="mlp")),
        ("nag", ModConfig(rate=(0.5,), unit="block")),
        ("plain", ModConfig(mlp_rate=(1.0,), rate=(0.5,), decider="predictor", kv="selected")),
        ("plain", ModConfig(rate=(0.5,), router="skip_class", decider="balance")),
        ("mhc", ModConfig()),  # has matrices before the norm as well
    ],
    ids=lambda v: v if isinstance(v, str) else f"{v.rate}{v.kv}{v.skip}{v.decider}{v.unit}",
)
def test_training_flops_are_those_xla_counts(scheme, mod, monkeypatch):
    monkeypatch.setattr(mhc, "SINKHORN_STEPS", 1)  # of 4 x 4 numbers; unrolled they are most of the program
    count, known = counted(scheme, mod)
    assert count == pytest.approx(known, rel=0.02)


def test_experts_cost_what_xla_counts():
    """By capacity with exactly the room for all choices: then what is computed is what runs."""
    moe = MoEConfig(4, 2, shared=1, hidden=512, dispatch="capacity", capacity=1.0)
    count, known = counted("plain", ModConfig(), moe)
    assert count == pytest.approx(known, rel=0.02)


def test_compressed_attention_costs_what_xla_counts():
    block = BlockConfig(cca=True, head_width=32)
    count, known = counted("plain", ModConfig(), block=block)
    assert count == pytest.approx(known, rel=0.02)
    one, two = (closed(tiny.blueprint(tiny.run_config(find_scheme("plain")(), depth=i, **SHAPE))) for i in (1, 2))
    assert known < 0.9 * (two - one)


def test_half_the_tokens_cost_at_most_six_tenths():
    """Of the whole compiled training step, by XLA's own count, with keys and values of all tokens; at a context where
    dense attention on a CPU computes all scores (`nagjax.layers.cpu.spans_of`)."""
    bench = RoutingTimes(scheme="plain", depth=24, width=256, context=256, batch=32)
    ratio = compiled_flops(bench, bench.mod) / compiled_flops(bench, ModConfig())
    assert 0.5 < ratio <= 0.6
    closed = [model_costs(bench.blueprint(mod)).train for mod in (bench.mod, ModConfig())]
    assert ratio == pytest.approx(closed[0] / closed[1], abs=0.03)


def test_rates_parameters_and_cache_by_hand():
    mod = ModConfig(rate=(0.0, 0.5), attention_rate=(0.25,), every=2, kv="selected")
    bp = tiny.blueprint(tiny.run_config(find_scheme("nag")(), depth=4, mod=mod))
    rates = mod_rates(bp.config.model)
    assert rates["sublayers"] == [0, 0, 0.25, 0, 0, 0, 0.25, 0.5]
    assert rates["attention"] == 0.125 and rates["mlp"] == 0.125 and rates["total"] == 0.125
    each, dense = model_costs(bp), model_costs(_dense(bp))
    attention, mlp = 16 * 16 * 2 + 16 * 8 * 2, 3 * 16 * bp.config.model.hidden
    assert dense.executed_parameters == sum(parameters_by_part(bp).values())
    assert dense.executed_parameters - each.executed_parameters == 0.5 * attention + 0.5 * mlp
    assert dense.kv_bytes == 4 * 2 * 8 * 4 and each.kv_bytes == dense.kv_bytes * (1 + 0.75 + 1 + 0.75) / 4
    facts = run_facts(bp)
    assert facts["mod_rate"] == rates and facts["train_flops_per_token"] == each.train < dense.train
    everything = dataclasses.replace(bp.config.model, mod=dataclasses.replace(mod, kv="all"))
    assert costs(everything, bp.parameters, "nag", "threshold").kv_bytes == dense.kv_bytes


@pytest.mark.parametrize(("scheme", "read_anyway"), [("review", 0), ("nag", 1)])
def test_a_skipped_sublayer_runs_neither_its_adapters_nor_its_gate(scheme, read_anyway):
    """But the gate that its score is made of, and the adapters of keys and values, which all tokens have."""
    mod = ModConfig(rate=(0.5,), every=3)
    bp = tiny.blueprint(tiny.run_config(find_scheme(scheme)(), mod=mod, lora=LoRAConfig(rank=2)))
    size = lambda tree: sum(math.prod(p.shape[1:]) for p in jax.tree.leaves(tree) if len(p.shape) >= 3)  # noqa: E731
    blocks = bp.parameters["blocks"]
    skipped = sum(size([blocks[kind]["branch"], blocks[kind]["lora"]]) for kind in ("attention", "mlp"))
    for part in ("branch", "lora"):
        skipped -= size([blocks["attention"][part][name] for name in ("key", "value")])
    skipped += sum(size(blocks[kind]["gate"]) for kind in ("attention", "mlp")) * (1 - read_anyway)
    ran = model_costs(_dense(bp)).executed_parameters - model_costs(bp).executed_parameters
    routers = sum(
        math.prod(p.shape) for kind in ("attention", "mlp") for p in jax.tree.leaves(blocks[kind].get("routing", {}))
    )
    assert ran == pytest.approx(0.5 * skipped - routers)


def test_who_skips_is_read_through_the_next_entry():
    bp = tiny.blueprint(tiny.run_config(find_scheme("mhc")(), mod=ModConfig(mlp_rate=(1.0,))))
    blocks = bp.parameters["blocks"]
    entries = [p for p in jax.tree.leaves(blocks["mlp"]["entry"]) if len(p.shape) >= 3]
    without = jax.tree.map(lambda p: p, bp.parameters)
    without["blocks"]["mlp"]["entry"] = {}
    both = (costs(bp.config.model, parameters, "random", "threshold") for parameters in (bp.parameters, without))
    whole, rest = (each.forward for each in both)
    assert whole - rest == 2 * sum(math.prod(p.shape) for p in entries) > 0


def _dense(bp):
    model = dataclasses.replace(bp.config.model, mod=ModConfig())
    return tiny.blueprint(dataclasses.replace(bp.config, model=model))


def test_a_token_costs_the_experts_it_chooses():
    """By hand; and equal to the dense model's but for the router, where as many features run."""
    moe = MoEConfig(6, 2, shared=1, hidden=16, skips=2)
    make = lambda **changes: tiny.blueprint(tiny.run_config(find_scheme("nag")(), hidden=48, **changes))  # noqa: E731
    bp, each, dense = make(moe=moe), model_costs(make(moe=moe)), model_costs(make())
    expert, router, depth = 3 * 16 * 16, 16 * 8, 3
    unchosen = depth * (6 - 6 * 2 / 8) * expert  # of eight choices two do nothing
    assert each.executed_parameters == sum(parameters_by_part(bp).values()) - unchosen
    assert each.forward == dense.forward + 2 * depth * (router - 0.5 * expert)
    half = make(moe=MoEConfig(6, 2, shared=1, hidden=16), mod=ModConfig(rate=(0.5,), skip="mlp", every=3))
    whole = make(moe=MoEConfig(6, 2, shared=1, hidden=16))
    own = 3 * expert + 16 * 6
    assert model_costs(whole).executed_parameters - model_costs(half).executed_parameters == pytest.approx(0.5 * own)


@pytest.mark.parametrize("options", [{"slots": 16}, {"shares": np.full((3, 2), 0.5)}], ids=lambda o: next(iter(o)))
def test_sampling_asks_the_predictor_about_every_token(options):
    mods = (ModConfig(rate=(0.5,), decider=decider) for decider in ("threshold", "predictor"))
    bps = [tiny.blueprint(tiny.run_config(find_scheme("plain")(), depth=3, mod=mod)) for mod in mods]
    threshold, predictor = (model_costs(bp, **options).forward for bp in bps)
    assert predictor - threshold == 2 * 6 * 16 * HIDDEN_WIDTH  # of its matrix
    assert model_costs(bps[0]).forward == model_costs(bps[1]).forward  # of training, without its decider


def keys_of_a_query(bp, rate: float, slots: int) -> tuple[float, float]:
    """As `costs` has them without slots, less as it has them with."""
    model, ran = bp.config.model, kept(rate, bp.config.model.context) / bp.config.model.context
    seen, held = (costs(model, bp.parameters, "nag", "threshold", slots=given).forward for given in (None, slots))
    return (seen - held) / (2 * model.depth * ran * 2 * model.heads * model.head_width)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 20])
@pytest.mark.parametrize("rate, kv", [(0.25, "selected"), (0.5, "selected"), (0.875, "selected"), (0.5, "all")])
def test_keys_are_those_that_a_query_sees_on_average(window, rate, kv):
    """Counted in every choice of so many of eight tokens."""
    tokens, counts = 8, []
    for chosen in itertools.combinations(range(tokens), kept(rate, tokens)):
        known = chosen if kv == "selected" else range(tokens)
        counts += [sum(0 <= query - key < (window or tokens) for key in known) for query in chosen]
    mod = ModConfig(rate=(rate,), kv=kv)
    block = BlockConfig(window=window)
    bp = tiny.blueprint(tiny.run_config(find_scheme("nag")(), context=tokens, mod=mod, block=block))
    held = kept(rate, tokens) if kv == "selected" else tokens
    assert keys_of_a_query(bp, rate, tokens) == pytest.approx(np.mean(counts) - held)


@pytest.mark.parametrize("slots", [3, 6, 8])
@pytest.mark.parametrize("mod", [{}, {"kv": "selected"}, {"kv": "selected", "capacity": "adaptive"}], ids=str)
def test_keys_of_a_cache_are_its_slots(slots, mod):
    bp = tiny.blueprint(tiny.run_config(find_scheme("nag")(), context=8, mod=ModConfig(rate=(0.5,), **mod)))
    model = bp.model(bp.abstract().params)
    caches = jax.eval_shape(lambda: model.empty_cache(1, slots))
    (room,) = {cache.keys.shape[3] for group in caches for cache in group}
    own = costs(bp.config.model, bp.parameters, "nag", "threshold", slots=slots).forward
    one = costs(bp.config.model, bp.parameters, "nag", "threshold", slots=1).forward
    each = 2 * bp.config.model.depth * 0.5 * 2 * bp.config.model.heads * bp.config.model.head_width
    assert own - one == pytest.approx(each * (room - 1))


def test_blocks_with_other_windows_cost_their_own():
    """Pruned or not: a block's window goes by its place before pruning."""

    def forward(block, **model):
        return model_costs(
            tiny.blueprint(tiny.run_config(find_scheme("plain")(), block=block, context=32, **model))
        ).forward

    narrow, wide, none = (forward(BlockConfig(window=window), depth=3) for window in (4, 8, None))
    assert narrow < wide < none
    mixed = BlockConfig(window=4, others=OtherBlocks((1, 2), 8))
    assert forward(mixed, depth=3) == pytest.approx((narrow + 2 * wide) / 3)
    kept = forward(mixed, depth=2, kept=(1, 2), depth_before=3)
    assert kept == pytest.approx(forward(BlockConfig(window=8), depth=2))
