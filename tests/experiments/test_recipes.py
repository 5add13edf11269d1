"""Every recipe, found by its file: its docstring is complete, and its smoke size runs to the end."""

import contextlib
import dataclasses
import functools
import json
import re
import shutil
import sys
import types

import jax
import pytest

from experiments import prune, sinks_and_outliers
from experiments.harness import command, compiled, jobs, matching
from experiments.harness import recipe as recipe_files
from experiments.harness.jobs import Record
from experiments.harness.pages import NOT_MEASURED, table
from experiments.harness.recipe import FIELDS, HOME, KNOWN, judged, load, names, read_header
from experiments.harness.results import read_result, result_file
from experiments.harness.sweep import settings_from
from nagjax.arguments import options_of
from nagjax.errors import UserError
from nagjax.runs.config import MeshConfig
from nagjax.train.loop import train


@pytest.mark.parametrize("name", names())
def test_header_and_sizes_are_complete(name):
    recipe = load(name)
    assert all(recipe.header[field] for field in FIELDS)
    assert f"experiments.{name}" in recipe.header["command"]
    known, _, told = recipe.header.get(KNOWN, "").partition(": ")
    assert not known or {*known.split(", ")} <= {*recipe.sizes}
    assert not re.search(rf"\b({'|'.join(recipe.sizes)}): ", told), "sizes stand before the first colon"
    kinds = {type(settings) for settings in recipe.sizes.values()}
    assert len(kinds) == 1 and dataclasses.is_dataclass(kind := kinds.pop())
    assert [option.name for option in options_of(kind) if not (option.text or command.TEXTS.get(option.name))] == []


def stand_in(config):
    """The run for all that differ from it in their rate, length, seed and devices: what a recipe reads off a run, and
    makes of it, is the same."""
    train = dataclasses.replace(config.train, steps=4, seed=0, eval_every=2, eval_batches=2, save_every=2)
    data, optimizer = dataclasses.replace(config.data, seed=0), dataclasses.replace(config.optimizer, lr=None)
    return dataclasses.replace(config, train=train, data=data, optimizer=optimizer, mesh=MeshConfig(data=1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run, which is trained once."""
    return functools.cache(lambda config: train(config, tmp_path_factory.mktemp("trained")))


@pytest.fixture
def runs_alike_are_one(trained, monkeypatch):
    """One is trained, and the jobs of the others begin with a copy of its folder; nor is a step timed, or compiled,
    that another test times or that was compiled before."""

    def copied(config, folder, *, label):
        return shutil.copytree(trained(stand_in(config)), folder, dirs_exist_ok=True)

    monkeypatch.setattr(jobs, "train", copied)
    monkeypatch.setattr(matching, "Racer", lambda *_: types.SimpleNamespace(seconds=lambda steps: 0.1))
    monkeypatch.setattr(compiled, "_compiled", functools.cache(compiled._compiled))
    monkeypatch.setattr(compiled, "SHALLOW", 4)


@pytest.fixture
def programs_stay(monkeypatch):
    """Between jobs a sweep forgets its programs, for long ones fill the memory; these are small, and the next job, and
    the next test, would make the same ones again."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


TRAINED_AS_IT_IS = "curse_of_depth"


@pytest.mark.parametrize("name", names())
def test_smoke(name, tmp_path, programs_stay, request, capsys):
    recipe = load(name)
    if name != TRAINED_AS_IT_IS:
        request.getfixturevalue("runs_alike_are_one")
    command.main(f"{name}.py", ["--size", "smoke", "--out", str(tmp_path), "--results", str(tmp_path)])
    assert recipe.header["claim"] in capsys.readouterr().out
    result = read_result(result_file(tmp_path, name, "smoke"))
    assert result["records"] and result["origin"]["versions"]["jax"]
    assert result["command"] == f"python -m experiments.{name} --size smoke"  # and no path of this machine
    assert (tmp_path / "plots" / f"{name}.smoke.png").read_bytes().startswith(b"\x89PNG")
    again = judged(recipe, recipe.settings("smoke"), result["records"], result["floors"])
    assert json.loads(json.dumps(dataclasses.asdict(again))) == result["summary"]
    # A result in the results folder shows in the table; a smoke run does not.
    row = lambda: next(line for line in table(tmp_path).splitlines() if f"[{name}]" in line)  # noqa: E731
    assert NOT_MEASURED in row()
    result_file(tmp_path, name, "smoke").rename(result_file(tmp_path, name, "cpu"))
    assert result["summary"]["headline"].replace("|", "\\|") in row() and NOT_MEASURED not in row()


def test_header_fields_may_span_lines():
    text = """Title.

    Claim: one
      two
    Source: three

    Prose: with a colon, and no field.
    """
    assert read_header(text) == {"claim": "one two", "source": "three"}


@pytest.mark.parametrize(
    "name, option, told",
    [
        ("prune", "seeds 0", "seeds = [0]: leaves nothing to run"),  # an empty result would replace the one there is
        ("prune", "seeds -5", "seeds = -5: give a whole number of at least 0"),
        ("field", "looks 0", "looks = 0: give a whole number of at least 1"),
        ("field", "widest 0", "widest = 0.0: give a number of at least 1"),
        ("field", "arms nag nag", "arms = ('nag', 'nag'): name each once"),
        ("prune", "schemes nag nag", "schemes = ('nag', 'nag'): name each once"),
        ("inverse_depth_toy", "test-batches 0", "test_batches = 0: give a whole number of at least 1"),
        ("inverse_depth_fit", "bootstrap 0", "bootstrap = 0: give a whole number of at least 1"),
        ("inverse_depth_fit", "dropped -1 40", "dropped = (-1, 40): give a whole number of at least 0"),
        ("mod_signals", "steps 8 4", "steps = (8, 4): give at least one, in ascending order"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_trained(name, option, told, tmp_path, capsys):
    folder = str(tmp_path / "out")
    with pytest.raises(SystemExit, match="2"):
        command.main(f"{name}.py", [*f"--{option}".split(), "--out", folder, "--results", folder])
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ("out", "results"))
def test_a_file_in_a_folder_s_place_is_named_before_anything_is_trained(option, tmp_path, capsys):
    (tmp_path / "file").touch()
    folders = {"out": tmp_path, "results": tmp_path} | {option: tmp_path / "file"}
    given = [f"--{name}={folder}" for name, folder in folders.items()]
    with pytest.raises(SystemExit, match="2"):
        command.main("prune.py", ["--size", "smoke", *given])
    said = capsys.readouterr()
    assert f"experiments: error: {tmp_path / 'file'}: " in said.err and not said.out


@pytest.mark.parametrize(
    "name, label, values",
    [
        ("prune", "scheme", ("plain", "nag")),
        ("calibrated_skipping", "kind", ("nag",)),
        ("mod_signals", "steps", (200, 1000)),
    ],
)
def test_a_verdict_is_there_where_all_runs_of_an_arm_diverged(name, label, values):
    recipe = load(name)
    result = read_result(result_file(HOME, name, "cpu"))
    settings = settings_from(recipe, result["settings"])
    lost = {"loss": None, "diverged": "at step 3"}
    for gone in [[value] for value in values] + [values]:
        records = [dataclasses.replace(r, metrics=lost) if r.labels[label] in gone else r for r in result["records"]]
        assert judged(recipe, settings, records, result["floors"]).verdict == "undecided"
        recipe.draw(settings, records)


def cut(scheme, seed, added):
    """A record of `prune`; None: diverged."""
    curve = [[0, 1.0, []], [2, 1.0 + (added or 0), []], [4, 1.0 + 2 * (added or 0), []]]
    metrics = {"loss": None} if added is None else {"loss": 1.0, "cuts": dict.fromkeys(prune.WAYS, curve)}
    return Record("", {"scheme": scheme, "seed": seed}, {}, metrics)


def test_a_scheme_that_diverged_is_not_the_one_that_is_pruned_best():
    settings = dataclasses.replace(prune.SIZES["cpu"], schemes=(prune.PLAIN, *prune.OTHERS))
    added = {prune.PLAIN: 0.1} | dict.fromkeys(prune.OTHERS, 0.3)
    records = [cut(scheme, seed, base + 0.01 * (seed % 2)) for scheme, base in added.items() for seed in range(1, 6)]
    records[0] = cut(prune.PLAIN, 1, 0.1)
    assert prune.summarise(settings, records).verdict == "supported"
    records[0] = cut(prune.PLAIN, 1, None)
    found = prune.summarise(settings, records)
    assert found.verdict == "undecided" and "1 diverged" in found.measured


def test_outliers_are_not_compared_without_the_runs_that_diverged():
    result = read_result(result_file(HOME, "sinks_and_outliers", "cpu"))
    first = next(r for r in result["records"] if r.labels["scheme"] == sinks_and_outliers.JUDGED)
    lost = dataclasses.replace(first, metrics={"loss": None})
    gaps = sinks_and_outliers._gaps([lost if r is first else r for r in result["records"]])
    assert gaps and all(gap.lost == 1 for gap in gaps.values())


def changed(value):
    """Another value of an option; None where none is known."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return type(value)(value + 1)
    if isinstance(value, tuple) and value and isinstance(value[0], int | float) and not isinstance(value[0], bool):
        return (type(value[0])(value[0] + 1), *value[1:])
    return value[:-1] if isinstance(value, tuple) and len(value) > 1 else None


WITHOUT_EFFECT = {("inverse_depth_toy", "temperatures")}  # in these two sizes


@pytest.mark.parametrize("name", [name for name in names() if name != "inverse_depth_fit"])
def test_a_job_of_other_options_has_another_name_or_config(name):
    """Or a result would be taken up, or reused, that was made with other options."""
    recipe = load(name)

    def told(settings):
        return {(job.name, json.dumps(job.config(), sort_keys=True)) for job in recipe.plan(settings)}

    both = recipe.sizes["smoke"], recipe.sizes["cpu"]
    same = {field.name for field in dataclasses.fields(both[0])}
    if all(len(getattr(settings, "factors", ())) == 1 for settings in both):
        same -= {"widest"}  # rates are not tuned
    for settings in both:
        base, here = told(settings) if same else None, set()
        for field in same:
            if (value := changed(getattr(settings, field))) is not None:
                with contextlib.suppress(UserError):
                    if told(dataclasses.replace(settings, **{field: value})) == base:
                        here.add(field)
        same = here
    without = {(name, field) for field in same} - WITHOUT_EFFECT
    assert not without, f"options that change no job: {without}; remove them, or list them in WITHOUT_EFFECT"


def test_a_file_that_is_no_recipe_is_told_before_anything_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "experiments.scratch", types.ModuleType("experiments.scratch"))
    for module in (recipe_files, command):
        monkeypatch.setattr(module, "names", lambda: ["inverse_depth_fit", "scratch"])
    with pytest.raises(SystemExit):
        command.main("inverse_depth_fit.py", ["--out", str(tmp_path)])
    told = capsys.readouterr()
    assert "experiments/scratch.py" in told.err and "a recipe needs SIZES" in told.err and not [*tmp_path.iterdir()]


def test_unknown_recipe_and_size_name_the_known_ones():
    with pytest.raises(UserError, match="isoflop_mod"):
        load("isoflop")
    with pytest.raises(UserError, match="smoke, cpu"):
        load("isoflop_mod").settings("huge")
