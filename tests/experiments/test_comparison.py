"""Comparisons of invented runs: what counts, what is shown, and how each kind of claim is decided."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import isoflop_mod
from experiments.harness.claims import Deeper, Lead, Lowest, Matches, Wall
from experiments.harness.comparison import Arm, Comparison, Measure, schemes
from experiments.harness.jobs import Record, Training
from experiments.harness.matching import train_flops, with_steps
from experiments.harness.rates import AtBest, Tuning
from experiments.harness.results import Summary
from experiments.harness.settings import Settings, Shape, check_settings, crossed, from_json
from experiments.harness.speed import speed_up, tokens_to
from nagjax.errors import UserError

SHAPES = crossed((8, 32), 16, 16, 8, 4)
SETTINGS = Settings(SHAPES, 5, ("plain", "nag"), (0.5, 1.0, 2.0))
GRID = {0.5: 0.2, 1.0: 0.0, 2.0: 0.1}  # above the best
COSTS = {"growth": 2.0, "late_turn_degrees": 3.0, "tokens": 512, "parameters": 1024, "curve": [[100, 6.0], [512, 3.0]]}


def runs(arm, shape, loss, best=1.0, diverges=()):
    """The grid on seed 0, then five fresh seeds a little apart."""
    labels = {"arm": arm, "shape": shape.name}
    found = [
        Record("", labels | {"seed": 0, "factor": f}, {}, COSTS | {"loss": loss + abs(np.log(f / best))}) for f in GRID
    ]
    for seed in range(1, 6):
        own = None if seed in diverges else loss + 0.01 * seed + 0.0003 * ((7 * seed + len(arm)) % 3)
        found.append(Record("", labels | {"seed": seed}, {}, (COSTS if own else {}) | {"loss": own}))
    return found


def records(losses, **options):
    """By arm and depth."""
    return [r for (arm, depth), loss in losses.items() for r in runs(arm, shape_of(depth), loss, **options)]


def shape_of(depth):
    return next(shape for shape in SHAPES if shape.depth == depth)


def comparison(claim, *arms):
    return Comparison(schemes(*(arms or ("plain", "nag"))), claim, "title")


LEAD = Lead("nag", "plain", along="depth", ahead=True)
GROWING = {("plain", 8): 3.0, ("nag", 8): 2.9, ("plain", 32): 3.0, ("nag", 32): 2.7}


def test_tasks_are_scored_at_the_end_of_a_run_alone_and_have_a_column_each():
    settings = dataclasses.replace(SETTINGS, tasks=("hellaswag",), looks=3)
    own = comparison(LEAD)
    train = own.config(settings, "nag", SHAPES[0]).train
    assert train.tasks == ("hellaswag",) and train.eval_every == 1
    due = [step for step in range(1, train.steps + 1) if step == train.steps or step % train.tasks_every == 0]
    assert due == [train.steps]
    found = records(GROWING)
    for record in found:
        if record.labels["arm"] == "nag" and "factor" not in record.labels:
            record.metrics["tasks"] = {"hellaswag/acc": 0.25 + 0.01 * record.labels["seed"]}
    columns = {(row["arm"], row["shape"]): row["hellaswag/acc"] for row in own.summarise(settings, found).table}
    assert all(told == ("0.280 [0.260, 0.300]" if arm == "nag" else "") for (arm, _), told in columns.items())
    assert "hellaswag/acc" not in own.summarise(settings, records(GROWING)).table[0]


def test_a_plan_is_grids_then_tunings_then_fresh_seeds():
    jobs = comparison(LEAD).plan(SETTINGS)
    kinds = [type(job) for job in jobs]
    assert kinds == [Training] * 12 + [Tuning] * 4 + [AtBest] * 20
    assert len({job.name for job in jobs}) == len(jobs)
    assert [job.labels["seed"] for job in jobs[-20:]] == [seed for seed in range(1, 6) for _ in range(4)]
    tried, fresh = jobs[1].run_config, jobs[-1].at(2.0).run_config
    assert (tried.train.seed, tried.data.seed, fresh.train.seed, fresh.data.seed) == (0, 0, 5, 5)
    assert fresh.optimizer.lr == pytest.approx(2 * jobs[-1].at(1.0).run_config.optimizer.lr)


@pytest.mark.parametrize("factors", [(0.5, 1.0, 2.0), (1.0,)])
def test_seeds_that_were_looked_at_before_are_not_run_again(factors):
    jobs = comparison(LEAD).plan(dataclasses.replace(SETTINGS, factors=factors, first_seed=3))
    compared = [job for job in jobs if "factor" not in job.labels and "seed" in job.labels]
    assert {job.labels["seed"] for job in compared} == {3, 4, 5, 6, 7}
    with pytest.raises(UserError, match="first_seed = 0: give a whole number of at least 1"):
        check_settings(dataclasses.replace(SETTINGS, first_seed=0))


def test_one_factor_is_no_tuning():
    jobs = comparison(LEAD).plan(dataclasses.replace(SETTINGS, factors=(1.0,)))
    assert {type(job) for job in jobs} == {Training} and len(jobs) == 20
    assert all("factor" not in job.labels and job.labels["seed"] > 0 for job in jobs)


def test_arms_change_scheme_model_and_optimizer():
    arms = {"a": Arm("plain", {"scaled_start": False}, {"qk_norm": False}, {"weight_decay": 0.3}), "b": Arm("nag")}
    found = Comparison(arms, Lowest("a"), "", optimizer={"clip": 0.0})
    config = found.config(dataclasses.replace(SETTINGS, arms=()), "a", SHAPES[0], 2.0)
    assert not config.scheme.scaled_start and not config.model.qk_norm and config.model.depth == 8
    assert (config.optimizer.weight_decay, config.optimizer.clip) == (0.3, 0.0)
    assert config.optimizer.lr == pytest.approx(2 * config.scheme.default_rate(16, 8))
    with pytest.raises(UserError, match="there are a, b"):
        found.plan(SETTINGS)


def test_a_claim_about_an_arm_that_is_not_there_is_refused():
    named = (Lowest("a", ("plian",)), Lowest("plian"), Lead("a", "plian", "depth"), Matches("a", ("plian",), 0.1))
    for claim in (*named, Wall("a", "plian", 4, 0.1), Deeper("plian")):
        with pytest.raises(UserError, match=r"claim = \['plian'\]: it names arms that are none; there are a, b"):
            Comparison({"a": Arm("plain"), "b": Arm("nag")}, claim, "")


def test_matched_flops_are_those_of_the_first_arm():
    settings = Settings(crossed((2, 4), 16, 16, 8, 50), 1, ("plain", "nag"), (1.0,), match="flops")
    by_arm = {(job.labels["arm"], job.labels["shape"]): job.run_config for job in comparison(LEAD).plan(settings)}
    for shape in settings.shapes:
        plain, nag = by_arm["plain", shape.name], by_arm["nag", shape.name]
        assert plain.train.steps == 50 > nag.train.steps
        assert abs(train_flops(nag) - train_flops(plain)) <= train_flops(with_steps(nag, 1)) / 2


def test_only_fresh_seeds_count():
    own = records(GROWING)
    outcome = comparison(LEAD).outcome(SETTINGS, own)
    assert set(outcome.losses("nag", SHAPES[0])) == {1, 2, 3, 4, 5}
    assert outcome.tried("nag", SHAPES[0]).factor == 1.0 and outcome.edges == []
    spoiled = [
        dataclasses.replace(r, metrics=r.metrics | {"loss": 0.1}) if r.labels.get("factor") == 1.0 else r for r in own
    ]
    again = comparison(LEAD).outcome(SETTINGS, spoiled)
    assert again.loss("nag", SHAPES[0]) == outcome.loss("nag", SHAPES[0])  # seed 0 is in no interval


def test_a_lead_that_grows_one_that_shrinks_and_an_edge():
    found = comparison(LEAD).summarise(SETTINGS, records(GROWING))
    assert found.verdict == "supported" and "+0.100" in found.headline
    shrinking = GROWING | {("nag", 32): 2.95}
    assert comparison(LEAD).summarise(SETTINGS, records(shrinking)).verdict == "not supported"
    shrinks = Lead("nag", "plain", along="depth", sign=-1)
    assert comparison(shrinks).summarise(SETTINGS, records(shrinking)).verdict == "supported"
    edged = comparison(LEAD).summarise(SETTINGS, records(GROWING, best=2.0))
    assert len(edged.details["at_the_grid_edge"]) == 4 and edged.table[0]["lr x"] == "2 (edge)"
    assert edged.table[0]["per parameter"] == "0.5"


def test_a_lead_along_tokens_is_averaged_over_depths():
    shapes = crossed((8, 32), 16, 16, 8, 4, 8)
    settings = dataclasses.replace(SETTINGS, shapes=shapes)
    lead = {(8, 512): 0.1, (32, 512): 0.3, (8, 1024): 0.05, (32, 1024): 0.15}
    own = [r for s in shapes for r in runs("plain", s, 3.0) + runs("nag", s, 3.0 - lead[s.depth, s.tokens])]
    found = comparison(Lead("nag", "plain", along="tokens", sign=-1)).summarise(settings, own)
    assert found.verdict == "supported" and "-0.100" in found.headline
    assert "without grid errors -0.100 [" in found.measured and {row["grid error"] for row in found.table} == {"0.0000"}
    # Plain's rate at 8 blocks and the fewer tokens is not the best there is: its lead to lose is smaller.
    own[2].metrics["loss"] = own[1].metrics["loss"] + 0.1  # at twice the best rate; at half of it 0.69 are lost
    error = comparison(LEAD).outcome(settings, own).tried("plain", shapes[0]).grid_error
    found = comparison(Lead("nag", "plain", along="tokens", sign=-1)).summarise(settings, own)
    assert error > 0.02 and f"without grid errors {-0.1 + error / 2:+.3f} [" in found.measured


def test_lowest_of_all():
    own = {("plain", 8): 3.1, ("nag", 8): 3.0, ("plain", 32): 3.1, ("nag", 32): 3.0}
    found = comparison(Lowest("nag", ("plain",))).summarise(SETTINGS, records(own))
    assert found.verdict == "supported" and found.table[0]["arm"] == "nag"
    own |= {("nag", 32): 3.2}
    assert comparison(Lowest("nag", ("plain",))).summarise(SETTINGS, records(own)).verdict == "not supported"
    # A rival that the size leaves out leaves the claim open.
    three = Comparison(schemes("plain", "nag", "lns"), Lowest("nag", ("plain", "lns")), "")
    two = dataclasses.replace(SETTINGS, arms=("plain", "nag"))
    assert three.summarise(two, records(GROWING)).reasons == ["without lns"]
    for claim in (Lowest("nag"), Lowest("nag", ("plain", "lns")), Matches("nag", ("plain", "lns"), 0.9)):
        three = dataclasses.replace(three, claim=claim)
        assert three.summarise(two, records(GROWING)).verdict == "undecided", claim
    assert dataclasses.replace(three, claim=Lowest("nag", ("plain",))).summarise(two, records(GROWING)).reasons == []


def test_runs_at_another_rate_than_their_trials_chose_decide_nothing():
    """As where the trials are of one result file and the runs of another."""
    own = records(GROWING)
    for record in own:
        if "factor" not in record.labels:
            record.metrics["factor"] = 1.0
    found = comparison(Lowest("nag", ("plain",)))
    assert found.summarise(SETTINGS, own).verdict == "supported"
    own[-1].metrics["factor"] = 2.0
    summary = found.summarise(SETTINGS, own)
    assert summary.verdict == "undecided"
    assert summary.reasons == ["nag 32x16-512 has runs at 2 times its rate, where its trials chose 1"]


def test_runs_that_are_equal_in_something_else_than_the_claim_says_decide_nothing():
    found = dataclasses.replace(comparison(Lowest("nag", ("plain",))), match="tokens")
    assert found.summarise(SETTINGS, records(GROWING)).verdict == "supported"
    summary = dataclasses.replace(found, match="flops").summarise(SETTINGS, records(GROWING))
    assert (summary.verdict, summary.reasons) == ("undecided", ["compared at equal tokens"])


def test_a_winner_that_diverges_wins_nothing():
    own = records(GROWING)
    kept = [r for r in own if not (r.labels["arm"] == "nag" and r.labels["shape"] == SHAPES[1].name)]
    broken = kept + runs("nag", SHAPES[1], 2.7, diverges=(3,))
    found = comparison(Lowest("nag", ("plain",)))
    assert found.summarise(SETTINGS, own).verdict == "supported"
    summary = found.summarise(SETTINGS, broken)
    assert summary.verdict == "undecided"
    row = next(row for row in summary.table if (row["arm"], row["shape"]) == ("nag", SHAPES[1].name))
    assert row["diverged"] == "1 of 5" and found.outcome(SETTINGS, broken).order(SHAPES[1]) == ["plain", "nag"]


def test_matching_a_wall_and_more_depth():
    near = {("plain", 8): 3.0, ("nag", 8): 3.001, ("plain", 32): 3.0, ("nag", 32): 3.001}
    matches = comparison(Matches("plain", ("nag",), margin=0.005))
    assert matches.summarise(SETTINGS, records(near)).verdict == "supported"
    further = records(near | {("nag", 8): 3.010})  # the margin is a share of the loss
    assert matches.summarise(SETTINGS, further).verdict == "supported"
    assert matches.summarise(SETTINGS, records(near | {("nag", 8): 3.1})).verdict == "not supported"
    for lost, verdict in ((1, "undecided"), (3, "undecided"), (4, "not supported")):  # as chance has it, or not
        broken = records({at: loss for at, loss in near.items() if at != ("nag", 32)})
        broken += runs("nag", shape_of(32), 3.001, diverges=range(1, 1 + lost))
        assert matches.summarise(SETTINGS, broken).verdict == verdict
    wall = comparison(Wall("plain", "nag", beyond=10, margin=0.1))
    walled = {("plain", 8): 3.05, ("nag", 8): 3.0, ("plain", 32): 3.9, ("nag", 32): 3.0}
    assert wall.summarise(SETTINGS, records(walled)).verdict == "supported"
    assert wall.summarise(SETTINGS, records(walled | {("plain", 32): 3.0})).verdict == "not supported"
    deeper = comparison(Deeper("nag"))
    assert deeper.summarise(SETTINGS, records(GROWING)).verdict == "supported"
    assert deeper.summarise(SETTINGS, records(GROWING | {("nag", 32): 3.2})).verdict == "not supported"


@pytest.mark.parametrize(
    "arm, depth, loss, diverges, verdict",
    [
        ("plain", 32, 3.9, (1, 2, 3), "supported"),  # and so behind on every seed
        ("plain", 32, 3.0, (1, 2, 3), "undecided"),  # the seeds it came through do not say that there is no wall
        ("plain", 32, 3.9, range(1, 6), "supported"),
        ("plain", 8, 3.05, (1, 2, 3), "not supported"),  # in front of the wall
        ("plain", 8, 3.05, range(1, 6), "not supported"),
        ("nag", 32, 3.0, (1, 2, 3), "undecided"),  # the rival fails, too
        ("nag", 32, 3.0, range(1, 6), "undecided"),
        ("nag", 8, 3.0, (1,), "undecided"),
    ],
)
def test_what_a_divergence_says_of_a_wall(arm, depth, loss, diverges, verdict):
    walled = {("plain", 8): 3.05, ("nag", 8): 3.0, ("plain", 32): 3.9, ("nag", 32): 3.0}
    del walled[arm, depth]
    own = records(walled) + runs(arm, shape_of(depth), loss, diverges=diverges)
    wall = comparison(Wall("plain", "nag", beyond=10, margin=0.1))
    assert wall.summarise(SETTINGS, own).verdict == verdict


def test_a_lead_without_a_slope_says_why():
    broken = records({at: loss for at, loss in GROWING.items() if at != ("plain", 32)})
    broken += runs("plain", shape_of(32), 3.0, diverges=(2,))
    found = comparison(LEAD).summarise(SETTINGS, broken)
    assert found.verdict == "undecided" and found.headline.endswith("per doubling of the depth: a run diverged")
    along = comparison(Lead("nag", "plain", along="tokens")).summarise(SETTINGS, records(GROWING))
    assert along.headline.endswith("per doubling of the tokens: needs two")


def test_without_fresh_seeds_the_tuning_s_own_are_shown_and_decide_nothing():
    own = [r for r in records(GROWING) if "factor" in r.labels]
    found = comparison(LEAD).summarise(dataclasses.replace(SETTINGS, seeds=0), own)
    assert found.verdict == "undecided" and "(tuning seed)" in found.measured and found.headline.endswith("+0.100 nats")
    deeper = comparison(Deeper("nag")).summarise(dataclasses.replace(SETTINGS, seeds=0), own)
    assert deeper.verdict == "undecided" and deeper.headline.endswith("(tuning seed) nats")


def test_a_best_rate_that_only_the_widened_grid_has_is_shown_with_its_run():
    first, *_ = SHAPES
    tried = [r for r in runs("nag", first, 2.0) if "factor" in r.labels]
    losses = [[0.25, 1.9], *([r.labels["factor"], r.metrics["loss"]] for r in tried)]
    widened = {"losses": losses, "widened": {"0.25": COSTS | {"loss": 1.9}}}
    tuning = Record("", {"arm": "nag", "shape": first.name}, {}, widened)
    found = comparison(LEAD).outcome(dataclasses.replace(SETTINGS, seeds=0), [*tried, tuning])
    assert found.tried("nag", first).factor == 0.25 and found.loss("nag", first).estimate == 1.9


def test_profiles_and_figures():
    measures = {"variance": Measure("variance", lambda run: run["variance"], log=True, profile=True)}
    found = dataclasses.replace(comparison(LEAD), measures=measures)
    own = [
        dataclasses.replace(r, metrics=r.metrics | {"variance": [1.0, 4.0]}) for r in records(GROWING, diverges=(2,))
    ]
    summary = found.summarise(SETTINGS, own)
    assert summary.details["variance"][f"{SHAPES[0].name}-nag"] == [1.0, 4.0]
    assert len(found.draw(SETTINGS, own).axes) == 3
    one = dataclasses.replace(SETTINGS, shapes=SHAPES[:1])
    ranked = dataclasses.replace(found, claim=Lowest("nag")).draw(one, own)
    assert [text.get_text() for text in ranked.axes[0].get_yticklabels()] == ["nag", "plain"]


def test_at_most_six_arms_are_labelled():
    arms = ("plain", "nag", "lns", "review", "rezero", "keel", "ngpt", "mhc")
    own = [r for i, arm in enumerate(arms) for shape in SHAPES for r in runs(arm, shape, 3.0 + 0.1 * i)]
    figure = comparison(LEAD, *arms).draw(dataclasses.replace(SETTINGS, arms=arms), own)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert len(labels) == 6 and {"plain", "nag"} <= set(labels)


def test_settings_survive_json_and_name_their_shapes():
    assert from_json(Settings, dataclasses.asdict(SETTINGS)) == SETTINGS
    assert [shape.name for shape in SHAPES] == ["8x16-512", "32x16-512"]
    assert Shape(64, 32, 64, 8, 4096).name == "64x32-2.1M"
    with pytest.raises(UserError, match="title"):
        Settings(SHAPES + SHAPES, 1)


CURVE = [[0, 6.0], [100, 4.0], [1000, 3.0], [10_000, 2.0]]


def test_tokens_to_a_loss_are_read_off_in_log_tokens():
    assert tokens_to(CURVE, 3.0) == pytest.approx(1000)
    assert tokens_to(CURVE, 2.5) == pytest.approx(10**3.5)
    assert tokens_to(CURVE, 4.5) == 100 and tokens_to(CURVE, 1.9) == float("inf")


def test_speed_up_of_a_shifted_curve_is_the_shift_and_has_an_inverse():
    twice = [[tokens // 2, loss] for tokens, loss in CURVE]
    twice.append([10_000, 2.0 - np.log10(2)])
    assert speed_up(twice, CURVE) == pytest.approx(2.0)
    assert speed_up(CURVE, twice) == pytest.approx(0.5)


def test_step_times_without_the_arm_that_they_are_told_in(monkeypatch):
    rows = [{"arm": "plain", "shape": "last"}]
    monkeypatch.setattr(Comparison, "summarise", lambda *_: Summary("a | b", "undecided", rows))
    times = Record("", {"step times": ""}, {}, {"step_seconds": {"plain": 0.1}})
    shown = isoflop_mod.COMPARISON.summarise(Settings((SimpleNamespace(name="last"),), 1), [times]).table
    assert shown[0]["step time / nag's"] == ""
