"""The order in which a search tries, and what it does not try."""

import dataclasses
import math

from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.plan.order import mesh_shape, options
from nagjax.plan.report import ranking, sort
from nagjax.plan.search import meshes, search
from nagjax.plan.topology import parse
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig, TrainConfig

TOPOLOGY = parse("v5e:2x4")
CONFIG = RunConfig(find_scheme("nag")(), ModelConfig(4, 256, context=1024), train=TrainConfig(batch=32))
CAPACITY = 100
COST = {"none": 1.0, "dots": 1.2, "block": 1.5}
SAVED = {"none": 400, "dots": 200, "block": 100}


def planned(state, saved):
    """A stand-in for the compiler: what is saved shrinks with the parts, the state with the shards."""

    def plan(config):
        shape = mesh_shape(config, TOPOLOGY)
        own = state // (shape["fsdp"] * shape["tensor"])
        peak = own + saved[config.model.remat] // config.train.accumulate
        seconds = COST[config.model.remat] * (1 + 0.01 * config.train.accumulate) * (1 + 0.1 * (shape["tensor"] - 1))
        return {
            "options": options(config, shape),
            "config": {"train": {"accumulate": config.train.accumulate}, "model": {"remat": config.model.remat}},
            "memory": {"parameters": own, "optimizer": 0, "capacity": CAPACITY, "peak": peak},
            "fits": peak <= CAPACITY,
            "bound": {"seconds": seconds, "limit": "compute"},
            "tokens_per_step": 1000,
        }

    return plan


def run(state=80, saved=SAVED, tries=100):
    return search(CONFIG, TOPOLOGY, planned(state, saved), tries, tell=lambda _: None)


def test_meshes_do_not_depend_on_the_parts_that_were_asked_for():
    """All numbers of parts are tried on each."""
    parts = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, accumulate=8))
    assert meshes(parts, TOPOLOGY) == meshes(CONFIG, TOPOLOGY)


def test_meshes_fill_the_machine_and_come_simplest_first():
    found = meshes(CONFIG, TOPOLOGY)
    assert all(math.prod((m.data, m.fsdp, m.tensor)) == 8 for m in found)
    assert (found[0].fsdp, found[1].data) == (8, 8) and max(m.tensor for m in found) == 4  # as many as heads
    assert len({(m.data, m.fsdp, m.tensor) for m in found}) == len(found)


def test_long_sequences_are_split_where_the_batch_is_small():
    model = dataclasses.replace(CONFIG.model, context=8192)
    found = meshes(dataclasses.replace(CONFIG, model=model, train=TrainConfig(batch=2)), TOPOLOGY)
    assert all(m.data * m.fsdp * m.tensor * m.sequence == 8 and m.data * m.fsdp <= 2 for m in found)
    assert {m.sequence for m in found} == {1, 2, 4}, "parts of no less than 2048 tokens"


def test_the_best_that_fits_comes_first():
    best = sort(run())[0]
    assert best["fits"] and best["memory"]["peak"] <= CAPACITY
    assert best["bound"]["seconds"] == min(r["bound"]["seconds"] for r in run() if r["fits"])


def test_no_more_is_recomputed_than_needed():
    tried = run(saved=dict.fromkeys(SAVED, 10))
    assert {r["config"]["model"]["remat"] for r in tried} == {"none"}
    assert {r["config"]["train"]["accumulate"] for r in tried} == {1}


def test_meshes_whose_state_is_too_large_are_left_at_once():
    tried = run(state=700)  # fits only on all 8
    wide = [r for r in tried if r["memory"]["parameters"] > CAPACITY]
    assert len({r["options"].partition("--mesh")[2] for r in wide}) == len(wide)


def test_tries_are_a_limit():
    assert len(run(tries=3)) == 3


def test_a_failed_try_does_not_end_the_search():
    def failing(config):
        if config.model.remat == "none":
            raise UserError("plan", "compiler", "gave up")
        return planned(80, SAVED)(config)

    found = search(CONFIG, TOPOLOGY, failing, 20, tell=lambda _: None)
    assert any(r["fits"] for r in found) and any("error" in r for r in found)
    assert "gave up" in ranking(found)


def test_ranking_lists_the_fitting_first(fitting, result):
    slow = fitting | {"bound": fitting["bound"] | {"seconds": 1.0}, "options": "--slow"}
    text = ranking([result | {"options": "--large"}, slow, fitting]).splitlines()
    assert "--scheme nag" in text[0] and "--slow" in text[1] and "--large" in text[2]
