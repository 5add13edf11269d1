"""What `import nagjax` offers, and how it shows itself in a notebook."""

import inspect
import subprocess
import sys

import pytest

import nagjax
from nagjax import notebook
from nagjax.errors import UserError
from nagjax.notebook import ARGUMENTS
from nagjax.options import read_options
from nagjax.residual.schemes.nag import NAG
from tests.run_folders import final_lines


def test_the_package_alone_imports_no_jax():
    code = "import sys, nagjax; assert {'fit', 'load', 'plot'} <= set(dir(nagjax)); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_call_is_there():
    assert (
        all(callable(getattr(nagjax, name)) for name in set(nagjax._calls()) - nagjax._MODULES)
        and "nag" in nagjax.schemes()
    )
    assert nagjax.find_scheme("nag") is NAG
    with pytest.raises(AttributeError, match="fit"):
        nagjax.nonsense  # noqa: B018


def test_options_find_their_place():
    config = read_options(
        {"scheme": NAG(directions=4), "data": "stdlib", "depth": 3, "lr": 0.1, "steps": 7, "batch": 2}
    ).config()
    assert (config.scheme.directions, config.model.depth, config.optimizer.lr) == (4, 3, 0.1)
    assert (config.train.steps, config.train.batch, config.data.path) == (7, 2, "stdlib")


def test_an_unknown_option_is_named_with_its_neighbour():
    with pytest.raises(UserError, match="dept = 3: did you mean 'depth'"):
        read_options({"dept": 3})
    with pytest.raises(UserError, match="out_dir = 'x': did you mean 'out'"):
        nagjax.fit(out_dir="x")
    with pytest.raises(UserError, match="zzz = 3: is not an option; known: accumulate, .*z_loss"):
        nagjax.fit(zzz=3)
    assert {*ARGUMENTS, "scheme", "options"} == {*inspect.signature(nagjax.fit).parameters}


def test_runs_show_their_facts_and_figures(make_run):
    folders = [make_run(name, final_lines(loss), scheme=name) for name, loss in (("plain", 1.9), ("nag", 1.8))]
    log = nagjax.log(folders[1])
    assert "validation loss 1.8000 nats per token" in repr(log) and nagjax.log(log) is log
    assert "<strong>1.8000</strong>" in nagjax.table(folders)._repr_html_()
    figure = nagjax.plot(folders, "growth")
    assert figure._repr_png_().startswith(b"\x89PNG") and len(repr(figure)) < 400
    with pytest.raises(UserError, match="turns.*growth"):
        nagjax.plot(folders, "turns")


def test_a_map_of_an_open_run_is_a_picture(run_folder):
    run = nagjax.load(run_folder)
    for shown in (run, run.blueprint, run.model):
        assert "4 blocks x 16" in repr(shown) and len(repr(shown)) < 400
    assert nagjax.depth_map(run, "it was dark").png.startswith(b"\x89PNG")


def test_what_is_no_run_is_refused_by_name(run_folder, tmp_path):
    path, model = str(run_folder), nagjax.load(run_folder).model
    calls = [
        lambda run: nagjax.complete(run, "it was"),
        lambda run: nagjax.answer(run, []),
        lambda run: nagjax.depth_map(run, "it was"),
        nagjax.diagnose,
    ]
    for call in calls:
        with pytest.raises(UserError, match=rf"run = '{path}': is not opened: give nagjax.load\('{path}'\)"):
            call(path)
        with pytest.raises(UserError, match="run = 'Transformer': .*nagjax.load or nagjax.fit"):
            call(model)
    for call in (nagjax.log, nagjax.table, nagjax.plot, lambda run: nagjax.table([run])):
        with pytest.raises(UserError, match="run = 'Transformer': give a run's folder"):
            call(model)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="is a model, not a run: it has no log"):
        nagjax.table(tmp_path)
    for call in (nagjax.table, nagjax.plot):
        with pytest.raises(UserError, match=r"runs = \[\]: give at least one"):
            call([])
    with pytest.raises(UserError, match="points = 'dict': give what .*calibrate returns"):
        nagjax.skip_curve({})


def test_arguments_of_another_kind_are_named(run_folder):
    run = nagjax.load(run_folder)
    for call, said in (
        (lambda: nagjax.complete(run, None), "prompts = None: give a text"),
        (lambda: nagjax.complete(run, b"def"), "prompts = b'def': give a text"),
        (lambda: nagjax.complete(run, [[1, 2]], tokens=5), "text = 'list': give a text; token ids"),
        (lambda: nagjax.complete(run, "a", max_tokens=5), "max_tokens = 5: did you mean 'tokens'"),
        (lambda: nagjax.complete(run, "a", tokens=5, stop=3), "stop = .*give a text each"),
        (lambda: nagjax.complete(run, "a", tokens=5, slide="no"), "slide = 'no': give true or false"),
        (lambda: run.logits([1, 2]), "text = 'list'"),
        (lambda: run.encode(3), "text = 'int'"),
        (lambda: nagjax.depth_map(run, 3), "text = 'int'"),
        (lambda: nagjax.diagnose(run, effort=1), "effort = 1: give a Effort"),
        (lambda: nagjax.diagnose(run, rules="drop"), "rules = 'drop': name at least one"),
        (lambda: nagjax.diagnose(None), "run = 'NoneType': give what nagjax.load"),
        (lambda: nagjax.load(None), "run = None: give a text; the folder"),
        (lambda: nagjax.load(run_folder, devices=2), "devices = 2: give a list of devices"),
        (lambda: nagjax.plot(run, ["loss"]), "figure = .*there are"),
        (lambda: nagjax.find_scheme(None), "scheme = None: .*known schemes"),
        (lambda: nagjax.probe(run.model, [[1]]), "batch = 'list': give a batch"),
        (lambda: nagjax.fit("nag", out="elsewhere", resume="prev"), "resume = 'prev': choose latest or previous"),
        (lambda: nagjax.fit("nag", out="elsewhere", callback=3), "callback = 3: give a function"),
        (lambda: nagjax.fit("nag", start=run_folder), "out = None: give a folder for the run that starts"),
    ):
        with pytest.raises(UserError, match=said):
            call()


def test_an_error_is_one_line_in_a_notebook():
    assert UserError("width", 0, "give more")._render_traceback_() == ["UserError: width = 0: give more"]


def test_a_scheme_that_was_named_is_told_from_none(tmp_path, monkeypatch):
    """With `start` it is said that it is not used, also where it is the default's name."""
    given = []
    monkeypatch.setattr(notebook, "train", lambda config, folder, **_: given.append("scheme" in config.given))
    monkeypatch.setattr(notebook, "open_run", lambda folder: folder)
    for scheme in ({}, {"scheme": "nag"}):
        nagjax.fit(**scheme, start="another", out=tmp_path, steps=1)
    assert given == [False, True]
