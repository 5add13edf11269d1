"""Bad input is named, with the fix."""

import sys
from pathlib import Path

import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.mod import ModConfig
from nagjax.mod.config import skips
from nagjax.mod.deciders import deciders
from nagjax.mod.routers import routers
from nagjax.model.transformer import Transformer
from nagjax.residual import find_scheme
from nagjax.runs.config import to_dict
from tests import tiny


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rate": (1.0,)}, r"mod.rate.*at least 0 and below 1 each; .*--mod.mlp-rate 1"),
        ({"rate": (-0.1,)}, "mod.rate"),
        ({"rate": ()}, "mod.rate"),
        ({"mlp_rate": (1.5,)}, "mod.mlp_rate.*1 removes the sublayer"),
        ({"every": 0}, "mod.every"),
        ({"unit": "block", "mlp_rate": (0.5,)}, "mod.mlp_rate.*--mod.rate alone, or --mod.unit sublayer"),
        ({"unit": "block", "skip": "mlp"}, "mod.skip.*whole blocks"),
        ({"skip": "mlp", "attention_rate": (0.5,)}, "mod.attention_rate.*no effect.*--mod.skip mlp"),
        (
            {"skip": "attention", "mlp_rate": (0.0, 1.0), "rate": (0.5,)},
            "mod.mlp_rate.*no effect.*--mod.skip attention",
        ),
        ({"ema": 1.0}, "mod.ema"),
        ({"aux_weight": -1.0}, "mod.aux_weight"),
    ],
)
def test_values_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        ModConfig(**options)


def test_more_stages_than_blocks():
    with pytest.raises(UserError, match="mod.rate = .*4 stages for 3 blocks"):
        tiny.model_config(mod=ModConfig(rate=(0.0, 0.1, 0.2, 0.3)))
    with pytest.raises(UserError, match="mod.mlp_rate = .*4 stages for 3 blocks"):
        tiny.model_config(mod=ModConfig(mlp_rate=(0.0, 0.1, 0.2, 0.3)))


@pytest.mark.parametrize(
    "options, kind",
    [
        ({"rate": (0.5,), "every": 4}, "attention"),
        ({"rate": (0.5,), "every": 9, "skip": "mlp"}, "MLP"),
        ({"rate": (0.5, 0.0), "every": 3}, "attention"),  # the only routed block is of the second stage
        ({"rate": (0.5,), "mlp_rate": (1.0, 0.0), "every": 3}, "MLP"),
        ({"rate": (0.5,), "every": 4, "unit": "block"}, "attention"),
        ({"rate": (0.5,), "every": 4, "capacity": "adaptive"}, "attention"),
    ],
)
def test_rates_that_no_block_takes(options, kind):
    with pytest.raises(UserError, match=f"mod.every.*skips no {kind} in any of 3 blocks"):
        tiny.model_config(mod=ModConfig(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"every": 9},  # of a model in which nothing skips
        {"rate": (0.5,), "every": 3},
        {"rate": (0.5, 0.0), "every": 2},
        {"rate": (0.5,), "skip": "mlp", "attention_rate": (0.0,)},  # as a pruned model has them
        {"skip": "mlp", "mlp_rate": (0.5,)},
        {"attention_rate": (0.0,), "mlp_rate": (0.5,), "every": 3},
    ],
)
def test_rates_that_some_block_takes(options):
    mod = tiny.model_config(mod=ModConfig(**options)).mod
    assert mod.active == any(map(any, mod.rates(3)))


@pytest.mark.parametrize(
    "scheme, options, message",
    [
        ("plain", {"router": "nag"}, "mod.router.*plain has no rotation angle.*the router linear"),
        ("nag", {"router": "linear"}, "mod.router.*no gradient.*the router nag"),
        ("peri_ln", {"router": "linear"}, "mod.router.*no gradient.*the router random"),
        ("nag", {"router": "skip_class"}, "mod.router.*no gradient.*the router nag"),
        ("nag", {"decider": "balance"}, "mod.decider.*not a logit.*threshold or predictor"),
        ("nag", {"router": "rand"}, "did you mean 'random'"),
        ("nag", {"decider": "aux_loss"}, "mod.decider.*not a logit.*threshold or predictor"),
        ("plain", {"decider": "treshold"}, "did you mean 'threshold'"),
    ],
)
def test_parts_that_do_not_fit(scheme, options, message):
    with pytest.raises(UserError, match=message):
        Transformer(tiny.model_config(mod=ModConfig(rate=(0.5,), **options)), find_scheme(scheme)(), nnx.Rngs(0))


def test_a_causal_pass_needs_thresholds():
    batch = tiny.packed_batch()
    model = Transformer(tiny.model_config(mod=ModConfig(rate=(0.5,))), find_scheme("nag")(), nnx.Rngs(0))
    with pytest.raises(UserError, match="no thresholds.*average cuts.*cuts=run.mod"):
        model(batch.tokens, batch.where, causal=True)
    with pytest.raises(UserError, match="causal=True"):
        model(batch.tokens, cache=model.empty_cache(*batch.tokens.shape))


@pytest.mark.parametrize("parts", [routers, deciders])
def test_names_are_file_names(parts):
    folder = Path(str(sys.modules[parts.__module__].__file__)).parent
    assert list(parts()) == sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def test_what_papers_have_is_there():
    assert {"linear", "nag", "random", "skip_class"} <= {*routers()}
    assert {"aux_loss", "balance", "predictor", "threshold"} <= {*deciders()}


def test_a_rate_alone_is_shown_as_a_tuple_and_only_rate_1_is_sent_to_the_removing_options():
    for rate, message in ((0.5, r"tuple, \(0.5,\)\)$"), ((1.5,), "below 1 each$")):
        with pytest.raises(UserError, match=message):
            ModConfig(rate=rate)


@pytest.mark.parametrize(
    "config",
    [
        ModConfig(),
        ModConfig(rate=(0.5,)),
        ModConfig(rate=(0.5,), skip="mlp", mlp_rate=(0.0,)),
        ModConfig(rate=(0.5,), attention_rate=(0.0,), mlp_rate=(0.0,)),
        ModConfig(attention_rate=(0.0, 0.5)),
        ModConfig(rate=(0.5,), every=2).among(4, [0, 2]),  # whose routed blocks were removed
    ],
    ids=repr,
)
def test_values_in_a_file_say_what_the_config_says(config):
    assert skips(to_dict(config)) == config.active
