"""Options of a run: one list, one builder, ranges that every config checks itself."""

import dataclasses
import math
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from nagjax import ranges
from nagjax.arguments import parse
from nagjax.cli import functions, verbs
from nagjax.commands.completion import every_option
from nagjax.data import DataConfig
from nagjax.declared import fields_of, scheme_fields, scheme_names
from nagjax.discovery import ELSEWHERE
from nagjax.errors import UserError
from nagjax.layers.config import BlockConfig, OtherBlocks, RopeConfig
from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.options import read_options, run_options
from nagjax.ranges import Range, check_value, field_hints, unwrapped
from nagjax.residual.registry import schemes
from nagjax.residual.schemes.nag import NAG
from nagjax.runs.config import MeshConfig, OptimizerConfig, RunConfig, TrainConfig, from_dict, to_dict
from nagjax.train.distributed.hosts_config import HostsConfig

CONFIGS = [
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    MeshConfig,
    DataConfig,
    ModConfig,
    BlockConfig,
    OtherBlocks,
    RopeConfig,
    HostsConfig,
]
NUMERIC = [(cls, field) for cls in [*CONFIGS, *schemes().values()] for field in fields_of(cls)]
NUMERIC = [(cls, field) for cls, field in NUMERIC if unwrapped(field.hint)[0] in (int, float)]


@pytest.mark.parametrize("name", schemes())
def test_a_scheme_declares_in_its_source_what_its_class_has(name):
    by_name = lambda fields: {field.name: field for field in fields}  # noqa: E731
    assert by_name(scheme_fields(name)) == by_name(fields_of(schemes()[name]))


def test_every_scheme_is_a_file():
    assert scheme_names() == list(schemes())


@pytest.mark.parametrize("cls, field", NUMERIC, ids=lambda x: getattr(x, "__name__", getattr(x, "name", None)))
def test_every_number_has_a_range_and_refuses_what_is_out_of_it(cls, field):
    kind, _, limits = unwrapped(field.hint)
    assert limits is not None, f"{cls.__name__}.{field.name} has no range"
    wrong = [math.nan, math.inf, -math.inf, "1", True]
    wrong += [10**30, 1.5] if kind is int else []
    for low, step in ((limits.ge, 1), (limits.gt, 0)):
        wrong += [] if low is None else [low - step]
    for high, step in ((limits.le, 1), (limits.lt, 0)):
        wrong += [] if high is None else [high + step]
    for value in wrong:
        with pytest.raises(UserError) as refused:
            cls(**{field.name: value})
        assert refused.value.field.endswith(field.name) and refused.value.fix.startswith("give a ")


def test_every_number_of_every_command_has_a_range():
    for verb in verbs():
        for words, function in functions(verb).items():
            for option in every_option(function):
                kind, _, limits = unwrapped(option.hint)
                if option.several:
                    kind, _, limits = unwrapped(option.kind)
                assert kind not in (int, float) or limits is not None, (words, option.name)


@pytest.mark.parametrize(
    "limits, text",
    [
        (Range(ge=0, lt=1), "at least 0 and below 1"),
        (Range(gt=0), "above 0"),
        (Range(ge=0, le=1), "from 0 to 1"),
        (Range(ge=1, le=ranges.LARGEST), "at least 1"),
        (Range(ge=0, le=2**32 - 1), "from 0 to 4294967295"),
    ],
)
def test_a_range_in_words(limits, text):
    assert str(limits) == text


@pytest.mark.parametrize("value", [(0.5, math.nan), (0.5, -0.1), (0.2, 1.0), 0.5, [0.5]])
def test_each_value_of_several_is_checked(value):
    with pytest.raises(UserError, match="mod.rate"):
        ModConfig(rate=value)


def test_a_value_of_another_type_is_refused():
    for cls, field, value in ((ModelConfig, "tied", 1), (ModelConfig, "mlp", "tanh"), (TrainConfig, "log", ("csv",))):
        with pytest.raises(UserError, match=field):
            cls(**{field: value})
    values = to_dict(RunConfig(NAG()))
    for part, name, value in (("train", "steps", "many"), ("model", "mod", 3), ("scheme", "ramp", None)):
        changed = values | {part: values[part] | {name: value}}
        with pytest.raises(UserError, match=name):
            from_dict(RunConfig, changed)


def sample(option):
    """A value of an option, other than its default where that is easy."""
    choices, kind = option.choices, unwrapped(option.kind)[0]
    if choices:
        value = choices[-1]
    elif kind is bool:
        value = not option.default
    elif kind is int:
        value = 2
    elif kind is float:
        value = 0.5
    else:
        value = option.default
    return (value,) if option.several else value


BESIDE = {
    "block.qk_gain": {"qk_norm": True},
    "accumulate": {"batch": 4},
    "tasks_every": {"eval_every": 1},
}  # what an option goes with
VALUES = {
    "parametrization": "mup",
    "data.mix": ("a=0.9@0,0.5@0.8", "b=1"),
    "block.rope.factor": 2.0,
    "block.rope.high": 3.0,
    "block.others.rope.factor": 2.0,
    "block.others.rope.high": 3.0,
    "data.tokenizer": "bytes",
    "freeze": ("embedding", "blocks.mlp.*"),
    "tasks": ("questions.jsonl", "arc_easy"),
}


@pytest.mark.parametrize("name", ["nag", "mhc"])
def test_every_option_of_the_command_line_is_one_of_fit(name):
    options = run_options(name)
    for option in options:
        beside = {"scheme": name} | BESIDE.get(option.name, {})
        value = name if option.name == "scheme" else VALUES.get(option.name, sample(option))
        given = beside | {option.name: value}
        words = [part for key, one in given.items() for part in flags(key, one)]
        from_words = read_options(parse(options, words, "nagjax train")).config()
        from_python = read_options(given).config()
        assert from_words == from_python, option.name
        if value != option.default and option.name != "scheme":
            assert from_python != read_options(beside).config(), option.name


def flags(name, value):
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        group, dot, field = flag.rpartition(".")
        return [f"--{flag}" if value else f"--{group}{dot}no-{field}"]
    if value is None:
        return []
    return [f"--{flag}", *map(str, value if isinstance(value, tuple) else [value])]


def test_groups_come_as_dicts_dataclasses_or_dotted():
    ways = [
        {"mesh": {"fsdp": 4}, "mod": {"rate": 0.25}, "data": "corpus", "block": {"rope": {"factor": 2.0}}},
        {"mesh": MeshConfig(fsdp=4), "mod": ModConfig(rate=(0.25,)), "data": DataConfig("corpus"),
         "block": BlockConfig(rope=RopeConfig(factor=2.0))},
        {"mesh.fsdp": 4, "mod.rate": [0.25], "data.path": "corpus", "block.rope.factor": 2.0},
    ]  # fmt: skip
    first, *others = (read_options(way).config() for way in ways)
    assert all(other == first for other in others)
    assert (first.mesh.fsdp, first.model.mod.rate, first.data.path) == (4, (0.25,), "corpus")


def test_a_preset_is_beneath_what_is_given():
    model = read_options({"preset": "20M", "depth": 3}).model
    assert (model.depth, model.width, model.context) == (3, 256, 512)


def test_a_scheme_comes_with_its_options_or_gets_them():
    assert read_options({"scheme": NAG(directions=4), "scheme.ramp": 0.2}).config().scheme == NAG(
        directions=4, ramp=0.2
    )
    with pytest.raises(UserError, match="scheme.ramps = 1: did you mean 'scheme.ramp'"):
        read_options({"scheme.ramps": 1})
    with pytest.raises(UserError, match="scheme.rank"):
        read_options({"scheme": "nag", "scheme.rank": 2})


@pytest.mark.parametrize(
    "name, meant",
    [
        *(("dept", "depth"), ("learning_rate", "lr"), ("n_layers", "depth"), ("hidden_size", "width")),
        *(("max_steps", "steps"), ("ramp", "scheme.ramp"), ("fsdp", "mesh.fsdp"), ("mod_rate", "mod.rate")),
    ],
)
def test_what_was_meant_is_asked(name, meant):
    """Also under other libraries' names, without a group's, and without the scheme's prefix."""
    with pytest.raises(UserError, match=f"{name} = 3: did you mean '{meant}'"):
        read_options({"scheme": "nag", name: 3})


def test_other_libraries_names_lead_to_options_that_exist():
    known = {option.name for scheme in schemes() for option in run_options(scheme)}
    assert {*ELSEWHERE.values()} - known == {"out", "tokens"}  # options of commands
    assert not {*ELSEWHERE} & known


def test_numbers_of_numpy_are_as_good_as_pythons():
    given = {"depth": np.int64(3), "lr": np.float32(0.5), "mod.rate": (np.float64(0.25), np.float32(0.5))}
    config = read_options({"scheme": NAG(directions=np.int32(4)), **given}).config()
    assert (
        config == read_options({"scheme": NAG(directions=4), "depth": 3, "lr": 0.5, "mod.rate": (0.25, 0.5)}).config()
    )
    kinds = {type(config.model.depth), type(config.scheme.directions), type(config.optimizer.lr)}
    assert kinds | {*map(type, config.model.mod.rate)} == {int, float}
    with pytest.raises(UserError, match="lr = .*give a number above 0; of an array its .item()"):
        read_options({"lr": jnp.float32(0.5)})


@pytest.mark.parametrize("name", ["dept", "mesh.fsd", "mod.rates", "model", "block.rope.factors", "zzz"])
def test_an_unknown_option_is_named(name):
    with pytest.raises(UserError, match=f"{name} = 3: (did you mean '.*--help-all|is not an option; known: )"):
        read_options({name: 3})


def test_a_value_where_a_group_is_expected():
    with pytest.raises(UserError, match=r"mod = 0.5: is a group: .*mod=\{\.\.\.\}, or .*mod.rate"):
        read_options({"mod": 0.5})


@pytest.mark.parametrize(
    "given",
    [
        {"data": "here", "data.path": "there"},
        {"data.path": "there", "data": {"path": "here"}},
        {"mod": ModConfig(rate=(0.5,)), "mod.rate": 0.25},
    ],
)
def test_an_option_that_was_given_twice(given):
    with pytest.raises(UserError, match="(data.path|mod.rate) = .*was given as .*, too"):
        read_options(given)


def test_none_is_a_value_where_it_is_allowed():
    assert parse(run_options(), ["--lr", "None", "--mod.mlp-rate", "1"], "nagjax train") == {
        "lr": None,
        "mod.mlp_rate": (1.0,),
    }
    with pytest.raises(UserError, match="depth"):
        parse(run_options(), ["--depth", "None"], "nagjax train")
    check_value("rank", None, field_hints(schemes()["review"])["rank"])


def test_a_class_of_a_notebook_cell_has_its_fields_without_texts(monkeypatch):
    """Its source is not a file that could be read."""
    monkeypatch.setitem(sys.modules, "a_cell", types.ModuleType("a_cell"))
    own = dataclasses.make_dataclass("InACell", [("start", float, 0.5)], frozen=True)
    own.__module__ = "a_cell"
    assert [(field.name, field.default, field.text) for field in fields_of(own)] == [("start", 0.5, "")]


def test_what_a_run_from_another_is_called_has_nothing_that_the_other_decides():
    options = read_options({"start": "runs/base", "steps": 40, "batch": 8})
    assert str(options) == "the model of runs/base, 40 steps of 8 sequences"
