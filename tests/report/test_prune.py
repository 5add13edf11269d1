"""A pruned run: its record, its losses, and that every command opens it."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax import cli
from nagjax.commands.prune import block_list
from nagjax.data import load_tokenizer
from nagjax.errors import UserError
from nagjax.generate.evaluate import evaluate
from nagjax.interop.exporting import export
from nagjax.interop.importing import import_model
from nagjax.measure.cuts import choose, forward_without
from nagjax.mod import ModConfig
from nagjax.report import pruning
from nagjax.report.curve import curve_of, pruning_curve
from nagjax.report.derived import fresh_state
from nagjax.report.diagnosis import diagnose
from nagjax.report.pruning import prune, without
from nagjax.report.verdict_depth import ranges, removable
from nagjax.residual import find_scheme
from nagjax.runs.opening import OpenRun, open_run
from tests import tiny
from tests.tiny import blueprint, model_config, moved, packed_batch, run_config
from tests.tolerance import assert_close, close_to

DEPTH, STEP = 4, 30  # of the run in `run_folder`


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_pruned_run_has_the_loss_that_was_told_and_heals(run_folder, tmp_path, capsys):
    source = contents(run_folder)
    cli.run(["prune", str(run_folder), "--out", str(tmp_path / "cut"), "--blocks", "2-3", "--batches", "3"])
    assert contents(run_folder) == source
    record = json.loads((tmp_path / "cut" / "prune.json").read_text())
    assert record["removed"] == [1, 2] and record["kept"] == [0, 3] and record["loss"]["healed"] is None
    assert f"{record['loss']['after']:.4f}" in capsys.readouterr().out
    scores = evaluate(tmp_path / "cut", batches=3)
    assert scores["loss"] == close_to(record["loss"]["after"], terms=64, chain=24) and scores["step"] == STEP
    assert abs(record["loss"]["after"] - record["loss"]["before"]) > 1e-3
    again = prune(tmp_path / "cut", tmp_path / "twice", blocks=[0], batches=3, heal_steps=3, lr=1e-2)
    healed = open_run(tmp_path / "twice")
    assert healed.config.model.kept == (3,) and healed.step == STEP + 3 and healed.progress == 1.0
    assert healed.config.scheme == open_run(tmp_path / "cut").config.scheme.trained()
    assert again["loss"]["before"] == close_to(record["loss"]["after"], terms=64, chain=24)
    assert again["loss"]["healed"] < again["loss"]["after"]
    assert evaluate(tmp_path / "twice", batches=3)["loss"] == close_to(again["loss"]["healed"], terms=64, chain=24)


def test_blocks_chosen_by_a_rule_and_the_curve(run_folder, tmp_path):
    record = prune(run_folder, tmp_path / "late", rule="late", count=1, batches=2)
    assert record["removed"] == [3] and record["kept"] == [0, 1, 2]
    cli.run(["prune", str(run_folder), "--curve", "--out", str(tmp_path / "curve"), "--batches", "2"])
    (curve,) = json.loads((tmp_path / "curve" / "curve.json").read_text()).values()
    assert [count for count, _, _ in curve["rules"]["angle"]] == [0, 1, 2]
    assert curve["loss"] == pytest.approx(record["loss"]["before"])
    assert dict((n, loss) for n, loss, _ in curve["rules"]["late"])[1] == pytest.approx(record["loss"]["after"])
    cheapest = min(loss for _, loss, _ in [curve["rules"]["late"][1], curve["rules"]["drop"][1]])
    assert curve["rules"]["drop"][1][1] <= cheapest + 0.05  # chosen on another text
    assert (tmp_path / "curve" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_two_curves_of_one_scheme_have_two_names(run_folder, tmp_path, capsys, monkeypatch):
    shutil.copytree(run_folder, tmp_path / "copy")
    names = []
    monkeypatch.setattr("nagjax.report.curve_plot.curve_plot", lambda curves: names.extend(n for n, _ in curves) or b"")
    runs = [str(run_folder), str(tmp_path / "copy")]
    cli.run(["prune", *runs, "--curve", "--out", str(tmp_path / "curve"), "--batches", "1"])
    assert names == [f"NAG, {run}" for run in runs]
    assert json.loads((tmp_path / "curve" / "curve.json").read_text()).keys() == {*runs}


def test_an_imported_model_is_pruned(tmp_path):
    plan = blueprint(run_config(find_scheme("plain")(), depth=3, vocab=257, context=16))
    export(OpenRun(tmp_path, plan, 100, moved(plan.create().params), {}, load_tokenizer("bytes")), tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "imported")
    record = prune(tmp_path / "imported", tmp_path / "cut", blocks=[0], batches=1)
    assert record["kept"] == [1, 2] == list(open_run(tmp_path / "cut").config.model.kept)
    scores = evaluate(tmp_path / "cut", batches=1)
    assert scores["loss"] == close_to(record["loss"]["after"], terms=64, chain=24) and scores["step"] == 0


@pytest.mark.parametrize(("unit", "name"), [("sublayer", "nag"), ("block", "lns")])
def test_blocks_that_stay_keep_their_place_and_their_routing(name, unit):
    """Compared with the whole model when its forward pass leaves the blocks out."""
    mod = ModConfig(rate=(0.5,), every=2, router="random", unit=unit)
    plan = blueprint(run_config(find_scheme(name)(), depth=DEPTH, mod=mod))
    state, batch = plan.create(), packed_batch()
    cuts = {"cuts": jnp.arange(2.0 * DEPTH)}
    run = OpenRun("run", plan, 100, moved(state.params), cuts, load_tokenizer("bytes"))
    short = without(without(run, [0]), [1])
    assert short.config.model.kept == (1, 3)
    assert short.config.model.mod.rates(2) == ((0.5, 0.5), (0.5, 0.5))
    np.testing.assert_array_equal(short.mod["cuts"], [2, 3, 6, 7])

    def logits(params):
        model = short.blueprint.model(params)
        return model.logits(model(batch.tokens, batch.where))

    stays = jnp.array([False, True, False, True])
    expected, _ = jax.jit(lambda p: forward_without(run.blueprint.model(p), batch, stays))(run.params)
    real = np.asarray(batch.weights) > 0
    assert_close(jax.jit(logits)(short.params)[real], expected[real], **tiny.FORWARD)


def test_an_adaptive_model_keeps_its_threshold():
    mod = ModConfig(rate=(0.5,), every=2, capacity="adaptive")
    plan = blueprint(run_config(find_scheme("nag")(), depth=6, mod=mod))
    state, batch = plan.create(), packed_batch()
    adaptive = {"cuts": jnp.full(12, 0.1), "debt": jnp.float32(0.25)}
    run = OpenRun("run", plan, 100, moved(state.params), adaptive, load_tokenizer("bytes"))
    short = without(run, [0, 1])
    assert short.config.model.mod == mod and short.config.model.mod.rates(4) == 2 * ((0.0, 0.0), (0.5, 0.5))
    assert short.mod["cuts"].shape == (8,) and short.mod["debt"] == 0.25

    def logits(run, stays):
        options = {"cuts": run.mod["cuts"], "causal": True}
        run_whole = jax.jit(lambda p: forward_without(run.blueprint.model(p), batch, jnp.array(stays), **options)[0])
        return run_whole(run.params)

    shorter, longer = logits(short, [True] * 4), logits(run, [False] * 2 + [True] * 4)
    real = np.asarray(batch.weights) > 0
    assert_close(shorter[real], longer[real], **tiny.FORWARD)

    assert without(run, [0, 2, 4]).config.model.mod.rates(3) == 3 * ((0.5, 0.5),)
    assert without(run, [1, 3, 5]).mod == {}
    with pytest.raises(UserError, match=r"blocks = \[1\].*skip blocks \[1, 3, 5\] of 5"):
        without(run, [0])


@pytest.mark.parametrize("mod", [{"unit": "block"}, {"capacity": "adaptive", "router": "random"}, {}])
def test_without_its_routed_blocks_a_model_is_dense(mod):
    mod = ModConfig(**{"rate": (0.5,), "every": 2, "router": "linear"} | mod)
    plan = blueprint(run_config(find_scheme("plain")(), depth=2, mod=mod))
    state = plan.create()
    run = OpenRun("run", plan, 100, state.params, state.mod, load_tokenizer("bytes"))
    short = without(run, [1])
    assert not short.config.model.mod.active and short.mod == {}
    assert jax.tree.structure(short.params) == jax.tree.structure(short.blueprint.parameters)


@pytest.mark.parametrize(
    "field, options",
    [
        ("blocks", {}),
        ("blocks", {"blocks": [1], "count": 1}),
        ("blocks", {"blocks": [4]}),
        ("blocks", {"blocks": [0, 1, 2, 3]}),
        ("count", {"count": 4}),
        ("rule", {"count": 1, "rule": "best"}),
        ("lr", {"blocks": [1], "heal_steps": 5}),
        ("heal_steps", {"blocks": [1], "lr": 0.1}),
    ],
)
def test_what_cannot_be_removed_is_refused(run_folder, tmp_path, field, options):
    with pytest.raises(UserError) as refused:
        prune(run_folder, tmp_path / "out", **options)
    assert refused.value.field == field and not (tmp_path / "out").exists()


def test_a_model_of_one_block_has_none_to_leave_out(monkeypatch, tmp_path):
    run = OpenRun("run", blueprint(run_config(find_scheme("plain")(), depth=1)), 0, {}, {}, load_tokenizer("bytes"))
    monkeypatch.setattr("nagjax.report.pruning.open_run", lambda *_, **__: run)
    whole = lambda: prune("run", tmp_path / "out", count=1)  # noqa: E731
    for look in (lambda: curve_of(run, None, (), 1), lambda: diagnose(run), whole):
        with pytest.raises(UserError, match="run = 'run': has a single block"):
            look()


@pytest.mark.parametrize("rules", [("influnce",), ()])
def test_unknown_rules_and_none_are_refused_before_anything_is_measured(run_folder, rules, monkeypatch):
    run = open_run(run_folder)
    for module in ("curve", "diagnosis"):
        monkeypatch.setattr(f"nagjax.report.{module}.text_batches", lambda *_: pytest.fail("measured"))
    for measured in (lambda: pruning_curve(run_folder, rules=rules), lambda: diagnose(run, rules=rules)):
        with pytest.raises(UserError, match="rule"):
            measured()
    if rules:
        with pytest.raises(UserError, match="did you mean 'influence'"):
            choose(*rules, 1, np.eye(4), np.zeros((4, 4)))


def test_nothing_is_overwritten(run_folder):
    with pytest.raises(UserError, match="not empty"):
        prune(run_folder, run_folder, blocks=[1])


def test_block_lists():
    assert block_list("3,7,20-22") == [3, 7, 20, 21, 22] and block_list("") == []
    assert ranges([21, 2, 19, 20]) == "3 and 20-22"
    for bad in ("a", "5-3", "1-2-3"):
        with pytest.raises(UserError, match="ranges"):
            block_list(bad)


def test_the_largest_cheap_set_is_taken():
    rules = {"late": [[0, 2.0, []], [2, 2.5, [2, 3]]], "drop": [[0, 2.0, []], [1, 1.99, [1]], [2, 2.015, [0, 1]]]}
    record = {"curve": {"loss": 2.0, "rules": rules}}
    rule, gone, cost = removable(record)
    assert (rule, gone) == ("drop", [0, 1]) and cost == pytest.approx(0.015)
    assert removable(record, 0.01)[1] == [1] and removable(record, -0.005)[1] == [1]


def test_a_config_of_places_that_are_none_is_refused():
    for kept in ((0,), (1, 0), (-1, 2), (1, 1)):
        with pytest.raises(UserError, match="kept"):
            model_config(depth=2, kept=kept, depth_before=4)
    assert dataclasses.replace(model_config(depth=2), kept=(0, 3), depth_before=4).indices == (1, 2, 7, 8)


def test_a_loss_that_is_not_finite_is_null(run_folder, tmp_path, monkeypatch, capsys):
    loss = lambda self, text, gone=(): float("inf") if self.depth < DEPTH else 2.0  # noqa: E731 (of what is written)
    monkeypatch.setattr(pruning.Cutter, "loss", loss)
    cli.run(["prune", str(run_folder), "--out", str(tmp_path / "cut"), "--blocks", "2", "--batches", "1"])
    record = json.loads((tmp_path / "cut" / "prune.json").read_text(), parse_constant=pytest.fail)
    assert record["loss"] == {"before": 2.0, "after": None, "healed": None}
    assert "loss 2.0000, without them n/m\n" in capsys.readouterr().out


def test_healing_goes_on_where_the_training_stopped(run_folder, tmp_path, monkeypatch):
    """With the batches that it would have taken, of a mixture as it would have been, without those it has left out."""
    folder, taken, make = tmp_path / "run", [], pruning.TrainBatches
    shutil.copytree(run_folder, folder)
    (folder / "skipped.json").write_text(json.dumps({"batches": [5, 31]}))

    class Told(make):
        def __init__(self, dataset, *sizes):
            taken.append(sizes)
            super().__init__(dataset, *sizes)

        def take(self, number):
            taken.append(number)
            return super().take(number)

    class Metrics:
        bad = np.int32(0)

    monkeypatch.setattr(pruning, "TrainBatches", Told)
    monkeypatch.setattr(pruning, "jit_train_step", lambda plan: lambda state, batch: (state, Metrics))
    run = open_run(folder)
    pruning.heal(run, fresh_state(run), 3, 1e-3, None)
    assert taken == [(2, 16, 1000), 32, 33, 34]


def test_one_bad_step_of_healing_is_enough(run_folder, tmp_path, monkeypatch):
    """Though the steps after it are good again, and the host looks only now and then."""
    calls, make = [], pruning.jit_train_step

    def once_bad(plan):
        step = make(plan)

        def run(state, batch):
            calls.append(len(calls))
            state, metrics = step(state, batch)
            return state, metrics._replace(bad=jnp.int32(len(calls) == 2))

        return run

    monkeypatch.setattr(pruning, "jit_train_step", once_bad)
    with pytest.raises(UserError, match="lr = 0.001: .*at step 32"):
        prune(run_folder, tmp_path / "out", blocks=[1], heal_steps=6, lr=1e-3)
    assert len(calls) == 6
