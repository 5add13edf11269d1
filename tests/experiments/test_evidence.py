"""What a result rests on, and the verdict that leaves."""

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
    assert found.tokens_per_parameter == (0.5, 0.5) and found.ngram == {"2": 2.6, "4": 2.0}
    assert (
        budget({"tokens": [61_440, 61_440], "tokens_per_parameter": [0.5, 0.75]})
        == "61k tokens, 0.5 to 0.75 per parameter"
    )


def test_what_bars_a_verdict():
    assert verdict(RUNS[:4])[1] == ["4 fresh seeds, 5 needed"]
    assert verdict([*RUNS[:4], run(5, 2.05)])[1] == ["above the 4-gram table"]  # the best arm, on one seed
    assert verdict([*RUNS, *(run(seed, 2.5, arm="bad") for seed in SEEDS)]) == ("supported", [])
    assert verdict(RUNS, at_the_grid_edge=["nag 8"])[1] == ["best rate at the grid's edge: nag 8"]


def test_the_seed_of_the_trials_is_none_of_the_fresh_ones():
    trials = [run(0, loss, factor=factor) for factor, loss in ((1.0, 1.8), (2.0, None))]
    found = evidence([*trials, *RUNS], FLOORS)
    assert (found.seeds, found.trials_diverged) == (5, 1) and "trials diverged: 1 of 2" in found.flags
    alone = evidence(trials, [floor(0, 2.0)])
    assert alone.seeds == 0 and "one seed, on which rates were chosen" in alone.flags


def test_a_divergence_is_a_flag():
    assert "diverged: 1 of 5" in evidence([*RUNS[:4], run(5, None)], FLOORS).flags


def test_released_tables_are_left_alone():
    records = [Record("", {}, {}, {"runs": 3})]
    assert concluded(Summary("", "supported"), records, []) == Summary("", "supported")
