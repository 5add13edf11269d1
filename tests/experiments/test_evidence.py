"""What a result rests on, and the verdict that leaves."""

import dataclasses

from experiments.harness.evidence import budget, concluded, evidence
from experiments.harness.jobs import Record
from experiments.harness.results import Summary

TEXT = {"data": {"path": "stdlib", "tokenizer": "bytes"}, "model": {"context": 64}}
TEXT["train"] = {"batch": 8, "steps": 120, "eval_batches": 10}
COSTS = {"tokens": 61_440, "parameters": 122_880}


def config(seed, **model):
    return TEXT | {"data": TEXT["data"] | {"seed": seed}, "model": TEXT["model"] | {"depth": 8, "width": 32} | model}


def run(seed, loss, **labels):
    return Record("", {"seed": seed} | labels, config(seed), COSTS | {"loss": loss})


def floor(seed, loss):
    return Record("", {"floor": True, "seed": seed}, config(seed), {"ngram": {"2": 2.6, "4": loss}})


SEEDS = range(1, 6)
RUNS = [run(seed, 1.9) for seed in SEEDS]
FLOORS = [floor(seed, 2.0) for seed in SEEDS]


def verdict(runs, floors=FLOORS, **details):
    found = concluded(Summary("", "supported", details=details), runs, floors)
    return found.verdict, found.reasons


def test_a_sound_result_keeps_its_verdict():
    assert verdict(RUNS) == ("supported", [])
    found = evidence(RUNS, FLOORS)
    assert (found.seeds, found.runs, found.diverged, found.flags) == (5, 5, 0, ("rates not tuned", "below 4-gram"))
    assert found.tokens_per_parameter == (0.5, 0.5) and found.ngram == {"2": (2.6, 2.6), "4": (2.0, 2.0)}
    assert (
        budget({"tokens": [61_440, 61_440], "tokens_per_parameter": [0.5, 0.75]})
        == "61k tokens, 0.5 to 0.75 per parameter"
    )


def test_tables_are_told_by_budget():
    longer = lambda steps: {"train": TEXT["train"] | {"steps": steps}}  # noqa: E731
    others = [dataclasses.replace(floor(s, 1.5), config=config(s, context=128)) for s in SEEDS]
    more = [dataclasses.replace(floor(s, 1.8 + 0.01 * s), config=config(s) | longer(240)) for s in SEEDS]
    assert evidence(RUNS, [*FLOORS, *more]).ngram == {"2": (2.6, 2.6), "4": (1.83, 2.0)}
    assert evidence(RUNS, others).ngram["4"] == (1.5, 1.5)


def test_what_bars_a_verdict():
    assert verdict(RUNS[:4])[1] == ["4 fresh seeds, 5 needed"]
    assert verdict([*RUNS[:4], run(5, 2.05)])[1] == ["above the 4-gram table"]  # the best arm, on one seed
    assert verdict([*RUNS, *(run(seed, 2.5, arm="bad") for seed in SEEDS)]) == ("supported", [])
    few = verdict([*RUNS, *(run(seed, 2.5, arm="bad") for seed in range(1, 4))])
    assert few == ("undecided", ["3 fresh seeds, 5 needed"])
    assert verdict(RUNS, at_the_grid_edge=["nag 8"])[1] == ["best rate at the grid's edge: nag 8"]


def test_texts_of_one_name_are_one_text():
    read = lambda record, text: dataclasses.replace(record, metrics=record.metrics | {"text": text})  # noqa: E731
    same = [read(one, "a") for one in RUNS]
    assert verdict(same) == ("supported", []) and verdict([*same[:4], RUNS[4]]) == ("supported", [])
    told = ("undecided", ["runs have read 2 different texts, all called stdlib"])
    assert verdict([*same[:4], read(RUNS[4], "b")]) == told
    assert verdict(same, [*FLOORS[:4], read(FLOORS[4], "b")]) == told


def test_the_seed_of_the_trials_is_none_of_the_fresh_ones():
    trials = [run(0, loss, factor=factor) for factor, loss in ((1.0, 1.8), (2.0, None))]
    found = evidence([*trials, *RUNS], FLOORS)
    assert (found.seeds, found.trials_diverged) == (5, 1) and "trials diverged: 1 of 2" in found.flags
    alone = evidence(trials, [floor(0, 2.0)])
    assert alone.seeds == 0 and "one seed, on which rates were chosen" in alone.flags


def test_arms_at_one_shape_may_read_more_or_less_and_one_of_them_has_to_be_below():
    """As where training FLOPs are matched. Each is held to the table of its own text."""

    def arm(seed, steps, loss, **metrics):
        own = config(seed) | {"train": TEXT["train"] | {"steps": steps}}
        labels = {"seed": seed, "arm": str(steps), "shape": "one"}
        return Record("", labels, own, COSTS | {"loss": loss, "steps": steps} | metrics)

    def table(seed, steps, loss):
        own = config(seed) | {"train": TEXT["train"] | {"steps": steps}}
        return Record("", {"floor": True, "seed": seed}, own, {"ngram": {"4": loss}})

    tables = [table(seed, steps, loss) for seed in SEEDS for steps, loss in ((120, 2.0), (150, 1.8))]
    runs = [arm(seed, 150, 1.9) for seed in SEEDS]
    assert verdict(runs, tables)[1] == ["above the 4-gram table"]
    found = evidence([*runs, *(arm(seed, 120, 1.95) for seed in SEEDS)], tables)
    assert (found.above_floor, found.shapes) == (0, 1)


def test_a_run_of_as_many_steps_as_its_time_allowed_is_held_to_the_table_measured_with_it():
    def timed(**metrics):
        return [Record("", {"seed": s}, config(s), COSTS | {"loss": 1.9, "steps": 150} | metrics) for s in SEEDS]

    assert evidence(timed(ngram={"4": 1.8}), FLOORS).above_floor == 1
    assert evidence(timed(ngram={"4": 1.95}), FLOORS).above_floor == 0
    assert evidence(timed(), FLOORS).shapes == 0  # the plan's table is of another text


def test_a_divergence_is_a_flag():
    assert "diverged: 1 of 5" in evidence([*RUNS[:4], run(5, None)], FLOORS).flags


def test_trials_of_a_widened_grid_count():
    grid = [run(0, loss, factor=factor) for factor, loss in ((1.0, 1.9), (2.0, None))]
    further = {"losses": [], "widened": {"4": COSTS | {"loss": 1.8}, "8": {"loss": None}}}
    own = [*grid, Record("", {"arm": "nag"}, config(0), further)]
    found = evidence([*own, *RUNS], FLOORS)
    assert (found.runs, found.trials_diverged) == (5, 2) and "trials diverged: 2 of 4" in found.flags
    alone = evidence(own, FLOORS)
    assert (alone.runs, alone.diverged) == (4, 2)


def test_what_was_trained_apart_at_untuned_rates_decides_nothing():
    deeper = [Record("", {"seed": seed}, config(seed, depth=9), COSTS | {"loss": 1.8}) for seed in SEEDS]
    assert verdict([*RUNS, *deeper]) == ("undecided", ["rates not tuned"])
    assert verdict([*RUNS, *deeper], within_one_model=True) == ("supported", [])
    assert verdict([run(0, 1.9, factor=1.0), *RUNS, *deeper]) == ("supported", [])


def test_released_tables_are_left_alone():
    records = [Record("", {}, {}, {"runs": 3})]
    assert concluded(Summary("", "supported"), records, []) == Summary("", "supported")
