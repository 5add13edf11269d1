import json
import math

import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.residual.registry import find_scheme
from nagjax.runs.log import load_run
from tests.run_folders import depth_line, eval_line, final_lines, train_line


def test_derived_facts_are_the_known_ones(make_run):
    run = load_run(make_run("a", final_lines(2.0, growth_per_sublayer=0.25, dead=3)))
    last = run.last_eval
    assert (last.step, last.tokens, last.loss) == (10, 20480, 2.0)
    assert last.bits_per_byte == pytest.approx(2.0 / math.log(2))
    assert run.step_seconds == 0.5  # the three 9-second lines are compilation
    assert run.depth_facts.growth == pytest.approx(math.exp(0.25 * 6))  # 8 sublayers, the first block's 2 left out
    assert run.depth_facts.late_turn_degrees == pytest.approx(6.5)  # sublayers 6 and 7
    assert run.depth_facts.dead_gates == 3
    assert (run.scheme, run.depth, run.lr, run.tokens, run.step) == ("nag", 4, 0.008, 20480, 10)


def test_a_learning_rate_left_to_the_scheme_is_the_highest_logged(make_run):
    lines = [{**train_line(step, 2.0), "lr": lr} for step, lr in ((1, 0.001), (2, 0.008), (3, 0.002))]
    assert load_run(make_run("a", lines, lr=None)).lr == 0.008
    assert load_run(make_run("b", [eval_line(1, 2.0)], lr=None)).lr is None


def test_before_the_end_of_the_warm_up_it_is_the_default(make_run):
    lines = [{**train_line(step, 2.0), "lr": 1e-6 * step} for step in range(1, 10)]
    folder = make_run("a", lines, lr=None, data={"path": "stdlib"})
    config = json.loads((folder / "config.json").read_text())
    for steps, peak in ((1000, find_scheme("nag")().default_rate(64, 4)), (50, 9e-6)):
        (folder / "config.json").write_text(json.dumps(config | {"train": {"steps": steps}}))
        assert load_run(folder).lr == peak


def test_dead_threshold_is_strict_and_nan_is_dead(make_run):
    line = depth_line(1)
    line["ratio"] = [0.05, 0.0499, 0.0, float("nan"), None, 0.06, 1.0, 0.2]
    assert load_run(make_run("a", [line])).depth_facts.dead_gates == 4


def test_the_last_depth_line_counts(make_run):
    run = load_run(make_run("a", [depth_line(10, dead=1), depth_line(5, dead=4)]))
    assert run.depth_log.step.tolist() == [5, 10]
    assert run.depth_facts.dead_gates == 1


def test_step_time_of_a_few_lines_and_of_none(make_run):
    few = [train_line(1, 3.0, seconds=9.0), train_line(2, 2.9, seconds=0.4)]
    assert load_run(make_run("few", few)).step_seconds == 0.4
    assert load_run(make_run("one", few[:1])).step_seconds is None, "it has compilation in it"
    assert load_run(make_run("none", [eval_line(1, 3.0)])).step_seconds is None


def test_after_a_resume_the_later_line_wins(make_run):
    lines = [
        train_line(1, 5.0),
        train_line(2, 4.0),
        train_line(3, 9.0),
        train_line(3, 3.0),
        train_line(2, 3.5),
    ]
    run = load_run(make_run("a", lines))
    assert run.train.step.tolist() == [1, 2, 3]
    assert run.train.loss.tolist() == [5.0, 3.5, 3.0]


@pytest.mark.parametrize("tail", ['{"kind": "train", "st', '{"kind": "eval", "step": 11, "loss": "\udce2', "", "\n"])
def test_a_half_written_last_line_is_passed_over(make_run, tail):
    folder = make_run("a", final_lines(2.0))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(tail.encode("utf-8", "surrogateescape"))
    assert load_run(folder).train.step.size == 10


def test_a_whole_last_line_without_newline_is_read(make_run):
    folder = make_run("a", final_lines(2.0), tail=json.dumps(eval_line(11, 1.5)))
    assert load_run(folder).last_eval.loss == 1.5


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ("{oops", "JSON"),
        ("[1, 2]", "kind"),
        ('{"step": 1}', "kind"),
        (json.dumps(train_line(1, 2.0)).replace('"lr"', '"rl"'), "'lr'"),
        (json.dumps({**train_line(1, 2.0), "loss": "low"}), "'loss'"),
        (json.dumps({**train_line(1, 2.0), "step": None}), "'step'"),
        (json.dumps({**depth_line(1), "turn": [0.1]}), "log_norm"),
        (json.dumps({**depth_line(1), "gate": 0.5}), "'gate'"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_line(make_run, bad, word):
    folder = make_run("a", final_lines(2.0, steps=2), tail=bad + "\n" + json.dumps(eval_line(3, 2.0)) + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:3") as error:
        load_run(folder)
    assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_null_and_nan_become_nan_and_unknown_kinds_are_passed_over(make_run):
    lines = [train_line(1, None), train_line(2, float("nan")), {"kind": "profile", "path": "x"}]
    run = load_run(make_run("a", lines))
    assert np.isnan(run.train.loss).tolist() == [True, True]
    assert np.isnan(run.train.mfu).all()


def test_events_and_sample(make_run):
    event = {"kind": "event", "step": 4, "message": "resumed"}
    run = load_run(make_run("a", [*final_lines(2.0), event], sample="def f"))
    assert [(e.step, e.message) for e in run.events] == [(4, "resumed")]
    assert run.sample == "def f"


def test_what_is_not_a_run_folder_is_refused(make_run, tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        load_run(tmp_path)
    with pytest.raises(UserError, match="not a run folder"):
        load_run(tmp_path / "nowhere")
    folder = make_run("a", [])
    (folder / "info.json").write_text("{")
    with pytest.raises(UserError, match="info.json"):
        load_run(folder)
    (folder / "info.json").unlink()
    with pytest.raises(UserError, match="has no info.json"):
        load_run(folder)


def test_a_fresh_run_loads_but_has_no_evaluation(make_run):
    run = load_run(make_run("a", [train_line(1, 5.5)]))
    assert run.depth_facts is None
    with pytest.raises(UserError, match="no evaluation yet"):
        _ = run.last_eval


def test_depth_lines_must_fit_the_configured_depth(make_run):
    with pytest.raises(UserError, match="model.depth"):
        load_run(make_run("a", [depth_line(1)], depth=6))


def test_an_unknown_setting_is_named(make_run):
    run = load_run(make_run("a", []))
    assert run.setting("train.batch") == 16
    with pytest.raises(UserError, match="train.shoe_size"):
        run.setting("train.shoe_size")
