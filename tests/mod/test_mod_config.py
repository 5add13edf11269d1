"""Bad input is named, with the fix."""

import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.mod import ModConfig
from nagjax.mod.deciders import deciders
from nagjax.mod.routers import routers
from nagjax.model.transformer import Transformer
from nagjax.residual import find_scheme
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
        ({"ema": 1.0}, "mod.ema"),
        ({"aux_weight": -1.0}, "mod.aux_weight"),
    ],
)
def test_values_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        ModConfig(**options)


def test_more_stages_than_blocks():
    with pytest.raises(UserError, match="4 stages for 3 blocks"):
        tiny.model_config(mod=ModConfig(rate=(0.0, 0.1, 0.2, 0.3)))


@pytest.mark.parametrize(
    "scheme, options, message",
    [
        ("plain", {"router": "nag"}, "mod.router.*plain has no rotation angle.*--mod.router linear"),
        ("nag", {"router": "linear"}, "mod.router.*no gradient.*--mod.router nag"),
        ("peri_ln", {"router": "linear"}, "mod.router.*no gradient.*--mod.router random"),
        ("nag", {"router": "skip_class"}, "mod.router.*no gradient.*--mod.router nag"),
        ("nag", {"decider": "balance"}, "mod.decider.*no logit.*threshold or predictor"),
        ("nag", {"router": "rand"}, "did you mean 'random'"),
        ("nag", {"decider": "aux_loss"}, "mod.decider.*no logit.*threshold or predictor"),
        ("plain", {"decider": "treshold"}, "did you mean 'threshold'"),
    ],
)
def test_parts_that_do_not_fit(scheme, options, message):
    with pytest.raises(UserError, match=message):
        Transformer(tiny.model_config(mod=ModConfig(rate=(0.5,), **options)), find_scheme(scheme)(), nnx.Rngs(0))


def test_a_causal_pass_needs_thresholds():
    batch = tiny.packed_batch()
    model = Transformer(tiny.model_config(mod=ModConfig(rate=(0.5,))), find_scheme("nag")(), nnx.Rngs(0))
    with pytest.raises(UserError, match="no thresholds.*nagjax calibrate"):
        model(batch.tokens, batch.where, causal=True)
    with pytest.raises(UserError, match="causal=True"):
        model(batch.tokens, batch.where, cache=model.empty_cache(*batch.tokens.shape))


def test_names_are_file_names():
    assert list(routers()) == ["linear", "nag", "random", "skip_class"]
    assert list(deciders()) == ["aux_loss", "balance", "predictor", "threshold"]
