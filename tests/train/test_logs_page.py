"""docs/logs.md lists every field that a run logs, and no other; what it says of the learning rate holds."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from nagjax.data import prepare
from nagjax.options import read_options
from nagjax.residual import find_scheme
from nagjax.runs.config import RatesConfig
from nagjax.train.loop import train
from nagjax.train.step import jit_train_step
from tests import tiny

PAGE = Path(__file__).parents[2] / "docs" / "logs.md"
SIZES = {"depth": 2, "width": 16, "context": 32, "steps": 2, "batch": 2, "eval_batches": 1, "mesh.data": 1}
ROUTED = {"scheme": "nag", "mod.rate": 0.25, "mod.capacity": "adaptive", "moe.experts": 4, "moe.active": 2}
RARE = {("train", "skipped")}  # of a bad step


def listed() -> set[tuple[str, str]]:
    """(kind, field) of every row of the page's tables."""
    found, kind = set(), ""
    for line in PAGE.read_text().splitlines():
        if begun := re.match(r"`(train|eval|depth)`, ", line):
            kind = begun[1]
        if line.startswith("| `"):
            found |= {(kind, name) for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    return found


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> list[str]:
    parts = []
    for name in ("one", "two"):
        folder = tmp_path_factory.mktemp(name)
        (folder / "in.jsonl").write_text("".join(f'{{"text": "{name * n}"}}\n' for n in range(3, 40)))
        prepare([str(folder / "in.jsonl")], folder / name, validation=0.3)
        parts.append(f"{folder / name}=0.5")
    return parts


def test_the_page_lists_what_runs_log(mixed, tmp_path):
    (tmp_path / "asked.jsonl").write_text('{"context": "a", "choices": ["b", "c"], "answer": 0}\n')
    given = SIZES | ROUTED | {"tasks": [str(tmp_path / "asked.jsonl")], "data.mix": mixed}
    run = train(read_options(given).config(), tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen = {(line["kind"], name) for line in lines for name in line.keys() - {"kind", "step"}}
    assert {"train", "eval", "depth", "tasks"} <= {line["kind"] for line in lines}
    assert ("tasks", "asked/acc") in seen
    page = listed()
    known = {name for kind, name in page if kind == "eval"}
    seen = {(kind, re.sub("^loss/.*", "loss/NAME", name)) for kind, name in seen if kind in ("train", "eval", "depth")}
    causal = {("eval", name) for kind, name in seen if name.startswith("causal_") and kind == "eval"}
    assert all(re.sub("loss/.*", "loss/NAME", name.removeprefix("causal_")) in known for _, name in causal) and causal
    assert page - RARE == seen - causal | {("eval", "causal_*")}


def test_the_rate_of_a_parameter_is_the_logged_one_times_what_the_page_says():
    """AdamW's first update is the rate, wherever the gradient is far above epsilon."""
    own = dict(weight_decay=0.0, clip=0.0, epsilon=1e-30, rates=RatesConfig(matrix=0.5, norm=3.0))
    model = dict(tied=False, parametrization="mup", width=64, base_width=16)
    blueprint = tiny.blueprint(tiny.run_config(find_scheme("plain")(), optimizer=own, **model))
    before = jax.device_get(tiny.fresh(blueprint))
    state, metrics = jit_train_step(blueprint)(tiny.fresh(blueprint), tiny.packed_batch(0))
    change = jax.tree.map(lambda new, old: np.median(np.abs(new - old)), jax.device_get(state.params), before.params)
    wanted = {"matrix": 0.5 / 4, "head": 1 / 4, "norm": 3.0}
    seen = set()
    for known, moved in zip(jax.tree.leaves(blueprint.parameters), jax.tree.leaves(change), strict=True):
        if known.role in wanted and moved:
            seen.add(known.role)
            np.testing.assert_allclose(moved, wanted[known.role] * float(metrics.lr), rtol=0.01, err_msg=known.role)
    assert seen == wanted.keys()
