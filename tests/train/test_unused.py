"""Options that would change nothing are told when a run begins, and no others are."""

import dataclasses

import jax
import numpy as np
import pytest

from nagjax.data import DataConfig, open_dataset
from nagjax.layers.config import BlockConfig, LoRAConfig, MoEConfig, OtherBlocks, RopeConfig
from nagjax.mod.config import ModConfig
from nagjax.residual import find_scheme
from nagjax.runs.config import RatesConfig
from nagjax.train.announce import announce
from nagjax.train.unused import unused
from tests import tiny

LORA = {"lora": LoRAConfig(rank=2)}
EVERYTHING = dict(rates=RatesConfig(head=2.0, matrix=0.5), optimizer="muon", schedule="wsd", cooldown=0.5, final=0.2)


def told(scheme="plain", optimizer=None, train=None, **model):
    return unused(tiny.blueprint(tiny.run_config(find_scheme(scheme)(), optimizer=optimizer, train=train, **model)))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (dict(optimizer=dict(optimizer="muon"), **LORA), {"optimizer": "trained are adapter"}),
        (dict(optimizer=dict(rates=RatesConfig(matrix=2.0)), **LORA), {"rates.matrix": "trained are adapter"}),
        (dict(optimizer=dict(weight_decay=0.3), **LORA), {"weight_decay": "on matrix"}),
        (dict(optimizer=dict(weight_decay=0.3, decay=("adapter",)), **LORA), {}),
        (dict(optimizer=dict(weight_decay=0.3, decay=())), {"weight_decay": "no role"}),
        (dict(optimizer=dict(decay=("matrix", "adapter"))), {"decay": "no adapter"}),
        (dict(optimizer=dict(rates=RatesConfig(adapter=0.0))), {"rates.adapter": "trained are"}),
        (dict(optimizer=dict(rates=RatesConfig(head=2.0)), tied=True), {"rates.head": "tied head"}),
        (dict(optimizer=dict(rates=RatesConfig(head=2.0)), tied=False), {}),
        (dict(optimizer=dict(rates=RatesConfig(norm=2.0), freeze=("norm",))), {"rates.norm": "trained are"}),
        (dict(optimizer=dict(cooldown=0.5)), {"cooldown": "--schedule wsd"}),
        (dict(optimizer=dict(schedule="constant", final=0.5)), {"final": "--schedule cosine"}),
        (dict(positions="learned", rope_base=5.0), {"rope_base": "--positions rotary"}),
        (dict(base_width=128), {"base_width": "--parametrization"}),
        (dict(parametrization="mup", base_width=128), {}),
        (dict(moe=MoEConfig(4, capacity=9.0)), {"moe.capacity": "--moe.dispatch capacity"}),
        (dict(moe=MoEConfig(4, capacity=9.0, dispatch="capacity")), {}),
        (dict(mod=ModConfig(rate=(0.5,), attention_rate=(0.2,), mlp_rate=(0.3,))), {"mod.rate": "rate of its own"}),
        (dict(mod=ModConfig(rate=(0.5,), skip="mlp", mlp_rate=(0.3,))), {"mod.rate": "rate of its own"}),
        (dict(block=BlockConfig(rope=RopeConfig(factor=4.0))), {"block.rope.factor": "--block.rope.scaling linear"}),
        (dict(block=BlockConfig(rope=RopeConfig("linear", 4.0, low=2.0))), {"block.rope.low": "scaling llama3"}),
        (dict(block=BlockConfig(rope=RopeConfig("yarn", 4.0, low=2.0, attention=1.1))), {}),
        (
            dict(positions="learned", block=BlockConfig(rotated=0.5, rope=RopeConfig(attention=1.1))),
            {"block.rotated": "--positions rotary", "block.rope.attention": "--positions rotary"},
        ),
        (
            dict(block=BlockConfig(others=OtherBlocks(window=3, rope_base=5.0))),
            {"block.others.window": "--block.others.places", "block.others.rope_base": "--block.others.rotary own"},
        ),
        (dict(block=BlockConfig(others=OtherBlocks((0,), 3, "own", 5.0, RopeConfig("linear", 4.0)))), {}),
        (dict(mod=ModConfig(rate=(0.5,), skip="mlp", kv="selected")), {"mod.kv": "attention sublayers"}),
        (dict(optimizer=dict(warmup=1.0, final=0.5)), {"final": "--warmup"}),
        (dict(train=dict(max_bad_steps=2)), {"max_bad_steps": "--on-bad-step"}),
        (dict(train=dict(max_bad_steps=2, on_bad_step="skip")), {}),
        (dict(mod=ModConfig(rate=(0.5,), aux_weight=0.5)), {"mod.aux_weight": "--mod.decider"}),
        (dict(mod=ModConfig(rate=(0.5,), ema=0.5, weight="tanh")), {}),
        (dict(scheme="nag", mod=ModConfig(rate=(0.5,), ema=0.5, weight="tanh")), {"mod.weight": "--mod.router linear"}),
        (dict(mod=ModConfig(rate=(0.5,), router="skip_class", weight="tanh")), {"mod.weight": "--mod.router linear"}),
        (
            dict(mod=ModConfig(rate=(0.5,), decider="predictor", ema=0.5, aux_weight=0.5)),
            {"mod.ema": "--mod.decider threshold"},
        ),
        (
            dict(scheme="nag", mod=ModConfig(rate=(0.5,), capacity="adaptive", ema=0.5)),
            {"mod.ema": "--mod.capacity fixed"},
        ),
        (dict(train=dict(tasks_every=50, tasks_limit=3)), {"tasks_every": "--tasks", "tasks_limit": "--tasks"}),
        (dict(mod=ModConfig(router="random", every=2)), {"mod.every": "--mod.rate", "mod.router": "--mod.rate"}),
        (dict(moe=MoEConfig(active=1, capacity=2.0)), {"moe.active": "--moe.experts", "moe.capacity": "--moe.experts"}),
        (dict(lora=LoRAConfig(alpha=1.0)), {"lora.alpha": "--lora.rank"}),
        (dict(scheme="nag", optimizer=EVERYTHING, tied=False, mod=ModConfig(rate=(0.5,), every=2)), {}),
        (dict(scheme="denseformer", mod=ModConfig(mlp_rate=(1.0,))), {"scheme": "behind an MLP"}),
        (dict(scheme="denseformer", mod=ModConfig(mlp_rate=(1.0, 0.5))), {}),
        (dict(scheme="denseformer", mod=ModConfig(attention_rate=(1.0,))), {}),
        (dict(mod=ModConfig(mlp_rate=(1.0,))), {}),
        (dict(scheme="nag", optimizer=dict(decay=("matrix", "gate", "embedding"))), {}),
        ({}, {}),
    ],
)
def test_options_without_effect(options, found):
    known = told(**options)
    assert known.keys() == found.keys()
    assert all(words in known[option] for option, words in found.items())


@pytest.mark.parametrize(("shuffle", "found"), [(True, set()), (False, {"data.seed"})])
def test_a_seed_of_rows_that_are_not_shuffled(shuffle, found):
    config = tiny.run_config(find_scheme("plain")())
    data = dataclasses.replace(config.data, shuffle=shuffle, seed=7)
    assert unused(tiny.blueprint(dataclasses.replace(config, data=data))).keys() == found


def test_they_do_change_nothing():
    def update(optimizer, **model):
        """What a step adds to the parameters, of gradients that are the same for all optimizers."""
        blueprint = tiny.blueprint(tiny.run_config(find_scheme("plain")(), optimizer=optimizer, **model))
        state = tiny.fresh(blueprint)
        params = blueprint.trained(state.params)
        found, _ = jax.jit(blueprint.optimizer.update)(tiny.moved(params), state.optimizer, params)
        return jax.device_get(found)

    def alike(one, other):
        return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))

    rates = RatesConfig(matrix=2.0, head=3.0, embedding=0.5)
    given = dict(optimizer="muon", rates=rates, weight_decay=0.3, cooldown=0.5)
    assert unused(tiny.blueprint(tiny.run_config(find_scheme("plain")(), optimizer=given, **LORA))).keys() == {
        "optimizer",
        "rates.matrix",
        "rates.head",
        "rates.embedding",
        "weight_decay",
        "cooldown",
    }
    assert alike(update(given, **LORA), update({}, **LORA))
    assert not alike(update(given), update({}))


def test_a_run_says_so_as_it_begins(capsys):
    config = tiny.run_config(find_scheme("plain")(), optimizer={"rates": RatesConfig(adapter=2.0)})
    corpus = open_dataset(DataConfig())
    announce(tiny.blueprint(config), "Plain", corpus)
    said = capsys.readouterr().err
    assert said.startswith("nagjax: --rates.adapter has no effect: trained are ") and said.count("\n") == 1
    announce(tiny.blueprint(tiny.run_config(config.scheme)), "Plain", corpus)
    assert not capsys.readouterr().err
