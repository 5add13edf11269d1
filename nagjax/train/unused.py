"""Options of a run that were given but have no effect: they belong to a part that it lacks, or to roles that it does
not train."""

import jax

from nagjax.data import DataConfig
from nagjax.layers.config import BlockConfig, LoRAConfig, MoEConfig, OtherBlocks, RopeConfig
from nagjax.mod.config import ModConfig
from nagjax.mod.routed import MoD
from nagjax.mod.routers.linear import LinearRouter
from nagjax.model.config import ModelConfig
from nagjax.parameters import ROLES
from nagjax.residual.schemes.denseformer import DenseFormer
from nagjax.runs.config import OptimizerConfig, RunConfig, TrainConfig
from nagjax.train.state import Blueprint


def unused(blueprint: Blueprint) -> dict[str, str]:
    """The options that have no effect in this run, each with the reason, by their names on the command line (with
    underscores). Only options that are not at their defaults are listed."""
    trained = {parameter.role for parameter in jax.tree.leaves(blueprint.parameters) if parameter.trained}
    return _of_roles(blueprint.config, trained) | _of_parts(blueprint.config) | _of_averages(blueprint.config)


def _of_roles(config: RunConfig, trained: set[str]) -> dict[str, str]:
    own, usual, found = config.optimizer, OptimizerConfig(), {}
    there = f"trained are {', '.join(sorted(trained))}"
    if own.optimizer == "muon" and "matrix" not in trained:
        found["optimizer"] = f"muon is for hidden matrices, and {there}"
    for role in ROLES:
        if getattr(own.rates, role) != 1.0 and role not in trained:
            tied = "; a tied head learns with the embedding" if role == "head" and config.model.tied else ""
            found[f"rates.{role}"] = f"{there}{tied}"
    if lacking := [role for role in own.decay if role not in trained and role not in usual.decay]:
        found["decay"] = f"no {', '.join(lacking)}: {there}"
    if own.weight_decay != usual.weight_decay and not trained.intersection(own.decay):
        found["weight_decay"] = f"it acts on {', '.join(own.decay) or 'no role'} (--decay), and {there}"
    return found


def _of_parts(config: RunConfig) -> dict[str, str]:
    """Options that differ from their defaults although the option that switches them on is off."""
    model, optimizer, train = config.model, config.optimizer, config.train
    rising = round(optimizer.warmup * train.steps) >= train.steps
    parts = [
        ("", optimizer, OptimizerConfig(), ("cooldown",), optimizer.schedule == "wsd", "--schedule wsd"),
        ("", optimizer, OptimizerConfig(), ("final",), optimizer.schedule != "constant", "--schedule cosine or wsd"),
        ("", optimizer, OptimizerConfig(), ("final",), not rising, "a --warmup that ends before the steps do"),
        ("", train, TrainConfig(), ("max_bad_steps",), train.on_bad_step != "raise", "--on-bad-step skip or rollback"),
        ("data.", config.data, DataConfig(), ("seed",), config.data.shuffle, "--data.shuffle"),
        ("", train, TrainConfig(), ("tasks_every", "tasks_limit"), bool(train.tasks), "--tasks"),
        ("", model, ModelConfig(), ("rope_base",), model.positions == "rotary", "--positions rotary"),
        ("", model, ModelConfig(), ("base_width",), model.parametrization != "standard", "--parametrization mup"),
        ("mod.", model.mod, ModConfig(), tuple(vars(model.mod)), model.mod.active, "--mod.rate"),
        ("moe.", model.moe, MoEConfig(), ("capacity",), model.moe.dispatch == "capacity", "--moe.dispatch capacity"),
        ("moe.", model.moe, MoEConfig(), tuple(vars(model.moe)), model.moe.experts > 0, "--moe.experts"),
        ("lora.", model.lora, LoRAConfig(), tuple(vars(model.lora)), model.lora.rank > 0, "--lora.rank"),
    ]
    parts += _of_rotary(model)
    if model.mod.active:
        parts += _of_routing(config)
    return {
        f"{prefix}{name}": f"needs {switch}"
        for prefix, own, usual, names, on, switch in parts
        for name in names
        if not on and getattr(own, name) != getattr(usual, name)
    }


def _of_rotary(model: ModelConfig) -> list[tuple]:
    """Rows for `_of_parts` about rotary embedding, and about the blocks whose attention is another."""
    block, others = model.block, model.block.others
    turned, own = model.positions == "rotary", bool(others.places) and others.rotary == "own"
    rows: list[tuple] = [
        ("block.", block, BlockConfig(), ("rotated",), turned, "--positions rotary"),
        ("block.others.", others, OtherBlocks(), ("window", "rotary"), bool(others.places), "--block.others.places"),
        ("block.others.", others, OtherBlocks(), ("rope_base",), own, "--block.others.rotary own"),
    ]
    for prefix, rope, on, switch in (
        ("block.rope.", block.rope, turned, "--positions rotary"),
        ("block.others.rope.", others.rope, own, "--block.others.rotary own"),
    ):
        by_wavelength = rope.scaling in ("llama3", "yarn")
        read = [  # which kinds of scaling read which fields
            (tuple(vars(rope)), on, switch),
            (("factor",), by_wavelength or rope.scaling == "linear", f"--{prefix}scaling linear, llama3 or yarn"),
            (("low", "high", "original"), by_wavelength, f"--{prefix}scaling llama3 or yarn"),
            (("divisors",), rope.scaling == "longrope", f"--{prefix}scaling longrope"),
        ]
        rows += [(prefix, rope, RopeConfig(), *row) for row in read]
    return rows


def _of_averages(config: RunConfig) -> dict[str, str]:
    """The options of DenseFormer, in a run where no token runs the MLP of any block: the model is then plain
    pre-norm."""
    rates = config.model.mod.rates(config.model.depth)
    if isinstance(config.scheme, DenseFormer) and all(mlp == 1.0 for _, mlp in rates):
        return {"scheme": "an average is taken behind an MLP, and --mod.mlp-rate 1 runs none"}
    return {}


def _of_routing(config: RunConfig) -> list[tuple]:
    """Rows for `_of_parts` about the options of single parts of routing."""
    own, usual = config.model.mod, ModConfig()
    rules = MoD.of(config.scheme, own, config.model.context)
    cuts = rules.decider.needs_cuts and not own.adaptive
    alone = any(getattr(own, f"{kind}_rate") is None for kind in own.skip.split(","))
    return [
        ("mod.", own, usual, ("rate",), alone, "a kind of sublayers without a rate of its own"),
        ("mod.", own, usual, ("kv",), own.routes("attention"), "attention sublayers that tokens skip"),
        ("mod.", own, usual, ("ema",), cuts, "--mod.decider threshold and --mod.capacity fixed"),
        ("mod.", own, usual, ("aux_weight",), rules.decider.trained, "a --mod.decider with a loss of its own"),
        ("mod.", own, usual, ("weight",), isinstance(rules.router, LinearRouter), "--mod.router linear"),
    ]
