"""Removes blocks of a trained model and writes what is left as a new run."""

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from nagjax.discovery import pick
from nagjax.errors import UserError, renamed
from nagjax.generate.evaluate import run_text
from nagjax.measure.cuts import RULES, Cutter, choose, staying
from nagjax.report.curve import check_depth, finite, measure, text_batches
from nagjax.report.derived import fresh_state, without_average, write_derived
from nagjax.residual.protocol import Bridge
from nagjax.runs.blueprint import ModelBlueprint
from nagjax.runs.names import PRUNED
from nagjax.runs.new_folder import new_folder
from nagjax.runs.opening import OpenRun, open_run
from nagjax.train.batches import Skipped, TrainBatches
from nagjax.train.distributed.mesh import check_devices
from nagjax.train.evaluator import put
from nagjax.train.state import Blueprint, TrainState
from nagjax.train.step import jit_train_step

WAIT = 16  # steps of healing between checks of their metrics, for which the host waits for the devices


def prune(
    folder: str | Path,
    out: str | Path,
    *,
    rule: str = "drop",
    count: int | None = None,
    blocks: Sequence[int] = (),
    batches: int = 8,
    heal_steps: int = 0,
    lr: float | None = None,
    data: str | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> dict:
    """Removes blocks of the run in `folder` permanently and writes the rest to the new folder `out`, as a run like any
    other.

    The blocks are those in `blocks` (indices from 0 among the blocks of the source), or `count` blocks chosen by a rule
    of `nagjax.measure.cuts.RULES` on training text. Blocks that stay keep their position in depth, and with it
    LayerNorm Scaling's factors, their Mixture-of-Depths rates and thresholds. `heal_steps` more training steps follow,
    at the constant rate `lr` after a warm-up over a tenth of them, with fresh moments, on the batches after those that
    the run has seen; all other settings are the run's, but no average of the parameters (`train.ema`) is kept.

    Returns a dict, which is also written to `prune.json`: `removed`, `rule`, `kept` (positions in the model before
    anything was ever removed from it), `source`, `batches`, `heal_steps`, `lr`, and `loss`. The losses, in nats per
    token, are on the first `batches` validation batches: `before`, `after`, and `healed` (None without healing); None
    if not finite. `after` is that of the run that is written; the rules judge the whole run with blocks left out of its
    forward pass, which may differ in two schemes (see `without`). A calibrated rate is not carried over. Parameters and
    batches are split over the `devices`; None: one local device.

    Raises UserError for whatever `open_run` does, an `out` in use, blocks that do not exist, and an unknown rule.
    """
    _check(rule, count, blocks, heal_steps, lr)
    with new_folder(out, "prune") as building:
        run = open_run(folder, devices=devices, calibrated=False)
        check_depth(run)
        if heal_steps:
            check_devices(run.config.train.batch // run.config.train.accumulate, run.blueprint.mesh.shape)
        cutter, held_out = Cutter(run), text_batches(run, data, "validation", batches)
        gone = sorted(set(blocks)) or chosen(run, cutter, rule, count, batches, data)
        before, short = finite(cutter.loss(held_out)), without(run, gone)
        after = finite(Cutter(short).loss(held_out))
        state, healed = fresh_state(short), None
        if heal_steps:
            short, state = heal(short, state, heal_steps, lr, data)
            healed = finite(Cutter(short).loss(held_out))
        record = {
            "source": str(folder),
            "rule": "list" if blocks else rule,
            "removed": gone,
            "kept": list(short.config.model.kept),
            "loss": {"before": before, "after": after, "healed": healed},
            "batches": len(held_out),
            "heal_steps": heal_steps,
            "lr": lr if heal_steps else None,
        }
        write_derived(short, state, building, run.folder, {PRUNED: record}, healed if heal_steps else after)
    return record


def chosen(run: OpenRun, cutter: Cutter, rule: str, count: int, batches: int, data: str | None) -> list[int]:
    """The blocks that a rule removes, chosen on training text."""
    if not 1 <= count < cutter.depth:
        raise UserError("count", count, f"remove at least 1 and at most {cutter.depth - 1} of {cutter.depth} blocks")
    return choose(rule, count, *measure(run, cutter, [rule], batches, data))


def without(run: OpenRun, gone: Sequence[int]) -> OpenRun:
    """The run without these blocks (indices from 0 among those it has), which are removed from its parameters and its
    config.

    It gives the same logits as the whole run with the blocks left out of its forward pass (`forward_without`), except
    in two schemes. denseformer: when a block that ends with an average is left out of the pass, the residual there
    enters the past that later averages read; in the shortened run the past has zeros instead. mix_ln: if the last
    Post-LN block that stays is followed by removed blocks and then by a Pre-LN block that is not the first one, these
    two both use that Pre-LN block's gain.

    Raises UserError as `staying` and `ModConfig.among` do.
    """
    model = run.config.model
    stays = staying(model.depth, gone)
    mod = model.mod.among(model.depth, stays) if model.mod.active else model.mod
    short = dataclasses.replace(
        model,
        depth=len(stays),
        kept=tuple(model.places[block] for block in stays),
        depth_before=model.sublayers_before // 2,
        mod=mod,
    )
    config = dataclasses.replace(without_average(run.config), model=short)
    blueprint = ModelBlueprint.of(config, run.blueprint.mesh)
    at = np.array(stays)
    shorter = _bridged(run.params, at, run.config.scheme.bridge(stays, model.places, model.sublayers_before // 2))
    blocks = {
        kind: {name: part for name, part in own.items() if name in blueprint.parameters["blocks"][kind]}
        for kind, own in shorter["blocks"].items()
    }
    state = {name: x.reshape(-1, 2)[at].ravel() if x.ndim else x for name, x in run.mod.items()} if mod.active else {}
    params = jax.device_put(shorter | {"blocks": blocks}, blueprint.parameter_shardings())
    return dataclasses.replace(run, blueprint=blueprint, params=params, mod=state)


def _bridged(params: dict, at: Int[np.ndarray, " l"], bridge: Bridge) -> dict:
    """The parameters of the blocks that stay, and those that their scheme passes on from removed blocks."""
    blocks = jax.tree.map(lambda x: x[at], params["blocks"])
    if "gate" in blocks["mlp"]:
        gates = jax.tree.map(lambda x: x[np.array(bridge.gates)], params["blocks"]["mlp"]["gate"])
        blocks = blocks | {"mlp": blocks["mlp"] | {"gate": gates}}
    if "entry" not in blocks["attention"]:
        return params | {"blocks": blocks}
    own = params["blocks"]["attention"]["entry"], params["entry"]
    every = jax.tree.map(lambda x, head: jnp.concatenate([x, head[None]])[np.array(bridge.entries)], *own)
    blocks = blocks | {"attention": blocks["attention"] | {"entry": jax.tree.map(lambda x: x[:-1], every)}}
    return params | {"blocks": blocks, "entry": jax.tree.map(lambda x: x[-1], every)}


def heal(run: OpenRun, state: TrainState, steps: int, lr: float, data: str | None) -> tuple[OpenRun, TrainState]:
    """Trains for `steps` more steps, without what the scheme does only early in training (`Scheme.trained`).

    Raises UserError if a step's loss or gradient is not finite, or if its loss spikes by the run's `spike`.
    """
    old = run.config
    total = run.step + steps
    rule = dataclasses.replace(old.optimizer, lr=lr, schedule="constant", warmup=0.1 * steps / total)
    train = dataclasses.replace(old.train, steps=total)
    config = dataclasses.replace(old, scheme=old.scheme.trained(), optimizer=rule, train=train)
    blueprint = Blueprint.of(config, run.blueprint.mesh)
    step, state = jit_train_step(blueprint), jax.device_put(state, blueprint.shardings())
    with renamed("out", "run"):
        order = Skipped(run.folder, fresh=False, fix="give a text with --data") if data is None else None
    bad, text = [], run_text(run, data, "train")
    # the steps of the whole training, so that a mixture's weights continue from where they were
    with closing(TrainBatches(text, train.batch, config.model.context, old.train.steps)) as batches:
        for number in range(run.step, total):
            state, metrics = step(state, put(blueprint, batches.take(order.batch_of(number + 1) if order else number)))
            bad.append(metrics.bad)
            if len(bad) == WAIT or number == total - 1:
                if (found := np.flatnonzero(jax.device_get(bad))).size:
                    at = number + 2 - len(bad) + int(found[0])
                    jumps = f" or jumps (the run has --spike {train.spike:g})" if train.spike else ""
                    fix = f"the loss or its gradient is not finite{jumps} at step {at}: give a lower one"
                    raise UserError("lr", lr, fix)
                bad.clear()
    healed = dataclasses.replace(run, blueprint=blueprint, step=total, params=state.params, mod=state.mod)
    return healed, state


def _check(rule: str, count: int | None, blocks: Sequence[int], heal_steps: int, lr: float | None) -> None:
    if bool(blocks) == (count is not None):
        raise UserError("blocks", list(blocks), "give either --blocks, or --count and a --rule")
    pick("rule", rule, RULES, "rules")
    if heal_steps < 0:
        raise UserError("heal_steps", heal_steps, "give a number of steps of at least 0")
    if heal_steps and lr is None:
        raise UserError("lr", lr, "healing needs a learning rate: give --lr, too, or leave --heal-steps out")
    if lr is not None and not heal_steps:
        raise UserError("heal_steps", heal_steps, "--lr is for healing: give --heal-steps, too, or leave --lr out")
    if lr is not None and not lr > 0:
        raise UserError("lr", lr, "give a learning rate above 0")
