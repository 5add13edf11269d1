"""The training step and the evaluation step, jitted on the run's mesh."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, UInt32

from nagjax.layers.balance import auxiliary_loss, balance_of, moved_biases
from nagjax.layers.platform import platform_of, tracing_for
from nagjax.mod.adaptive import Control, Pool, controlled
from nagjax.mod.config import ModConfig
from nagjax.mod.cuts import decay_after, moved_cut
from nagjax.model.transformer import Output, Transformer
from nagjax.runs.blueprint import ModelBlueprint
from nagjax.train.distributed.mesh import batch_parts, batch_sharding, pin_rows, replicated, row_axes
from nagjax.train.head_loss import head_loss
from nagjax.train.loss import Batch, Sums
from nagjax.train.optimizer import schedule
from nagjax.train.safety.guard import guarded
from nagjax.train.state import Blueprint, TrainState
from pallas_kernels.placement import shard_rows


class StepMetrics(NamedTuple):
    """Scalars of one step. The loss is in nats per counted target; loss and accuracy are NaN if there is no such
    target."""

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]
    grad_norm: Float[Array, ""]
    lr: Float[Array, ""]
    count: Float[Array, ""]
    mod_rate: Float[Array, ""] | None  # adaptive depth only: share of the routed (token, sublayer) pairs that skipped
    bad: Int[Array, ""]  # 0: a good step; n: the n-th bad step in a row
    expert_max: Float[Array, ""] | None = None  # models with experts only: see `nagjax.layers.balance.Balance`
    expert_min: Float[Array, ""] | None = None
    expert_entropy: Float[Array, ""] | None = None
    expert_dropped: Float[Array, ""] | None = None


class EvalSums(NamedTuple):
    """Totals and means of one evaluation batch. `bytes` is the decoded size of the counted targets. Means over the
    `tokens` that are not padding: `telemetry`, per sublayer [S], and `routing`, the decisions of Mixture-of-Depths."""

    sums: Sums
    bytes: Float[Array, ""]
    tokens: Int[Array, ""]
    telemetry: dict[str, Float[Array, " S"]]
    routing: dict[str, Float[Array, "S ..."]] | None


def progress(blueprint: ModelBlueprint, step: Int[Array, ""]) -> Float[Array, ""]:
    """Share of the training that is done, float32."""
    return step.astype(jnp.float32) / blueprint.config.train.steps


def noise(state: TrainState, parts: int) -> UInt32[Array, " n"]:
    """The random router's seeds for this step, one for each part of the batch, within which it draws by a row's
    position."""
    return jax.random.bits(jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step), (parts,))


def auxiliary(model: Transformer, output: Output) -> Float[Array, ""] | float:
    """The auxiliary loss in nats, over the part of a batch that is processed at once: the weighted loss of a trained
    causal decider, mean over sublayers and tokens, plus the load-balancing loss of experts."""
    experts = 0.0 if output.experts is None else auxiliary_loss(output.experts, model.config.moe)
    if output.routing is None or not model.mod.decider.trained:
        return experts
    return experts + model.config.mod.aux_weight * jnp.mean(output.routing["loss"])


class Cuts(NamedTuple):
    """Per sublayer [S]: the sum of the top-k cuts, and the number of sequences that have one."""

    total: Float[Array, " S"]
    rows: Float[Array, " S"]


def _cuts(model: Transformer, output: Output, batch: Batch) -> Cuts | Pool | None:
    if output.routing is None:
        return None
    if model.config.mod.adaptive:
        routed = jnp.asarray([0.0 < rate < 1.0 for pair in model.config.mod.rates(model.config.depth) for rate in pair])
        tokens = jnp.sum(batch.segment_ids > 0).astype(jnp.float32)
        found = (output.routing[name] for name in ("above", "executed"))
        above, ran = (tokens * jnp.dot(routed, share, precision="highest") for share in found)
        return jax.lax.stop_gradient(Pool(above, ran, tokens * jnp.sum(routed)))
    cut, rows = (jax.lax.stop_gradient(output.routing[name]) for name in ("cut", "cuts"))
    return Cuts(jnp.where(rows > 0, cut * rows, 0.0), rows)


def _balanced(params: Any, before: Any, load: Float[Array, "L n"], rate: float) -> Any:
    """The parameters with the experts' balancing biases moved by their `load`, starting from the values before the
    step, so that neither a gradient nor weight decay moves them."""
    move = lambda path, p, old: moved_biases(old, load, rate) if path[-1].key == "balance" else p  # noqa: E731
    blocks = params["blocks"]
    branch = jax.tree_util.tree_map_with_path(move, blocks["mlp"]["branch"], before["blocks"]["mlp"]["branch"])
    return params | {"blocks": blocks | {"mlp": blocks["mlp"] | {"branch": branch}}}


def _averaged(state: TrainState, found: Cuts | Pool | None, mod: ModConfig) -> dict[str, Array]:
    """The cuts after this step. With adaptive depth there is one threshold for all sublayers, moved towards its rate
    (see `nagjax.mod.adaptive`). Otherwise they are exponential moving averages, whose decay grows with the number of
    good steps (`decay_after`). A batch without a cut leaves the average as it is; an average that is not finite (there
    was no cut yet) is replaced."""
    if found is None:
        return state.mod
    if isinstance(found, Pool):
        own = controlled(Control(jnp.max(state.mod["cuts"]), state.mod["debt"]), found, mod.rate[0])
        return {"cuts": jnp.broadcast_to(own.cut, state.mod["cuts"].shape), "debt": own.debt}
    decay = decay_after(state.guard.good, mod.ema)
    return {"cuts": moved_cut(state.mod["cuts"], found.total / jnp.maximum(found.rows, 1.0), found.rows, decay)}


def _mixed(average: Any, params: Any, done: Int[Array, ""], decay: float) -> Any:
    """The moving average of the parameters after a step that follows `done` good ones. Its decay is min(decay, (1 +
    done) / (10 + done)), so that the initial values are soon forgotten; Tarvainen and Valpola 2017,
    arXiv:1703.01780."""
    steps = done.astype(jnp.float32)
    kept = jnp.minimum(decay, (1.0 + steps) / (10.0 + steps))
    return jax.tree.map(lambda old, new: old + (1.0 - kept) * (new - old), average, params)


def train_step(blueprint: Blueprint) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """A training step as a pure function: the gradient of the batch's mean loss (plus z-loss and `auxiliary`), the
    optimizer, and the new state. `nagjax.train.safety.guard` defines what a bad step, or one without a counted target,
    changes.

    With accumulation the batch is processed in parts. The gradient is still that of the whole batch's mean, except that
    the load-balancing loss of experts is the mean over the parts (`auxiliary`).

    Raises UserError for a model that is not causal.
    """
    blueprint.config.model.check_causal("training")
    train, mesh, moe = blueprint.config.train, blueprint.mesh, blueprint.config.model.moe
    leaves = jax.tree_util.tree_leaves_with_path(blueprint.trained(blueprint.parameters))
    balanced = any(path[-1].key == "balance" for path, _ in leaves)
    rate = schedule(blueprint.config.optimizer, blueprint.config.learning_rate, train.steps)

    def summed_loss(trained, part: Batch, seed, state: TrainState, share):
        model = blueprint.model(blueprint.with_trained(state.params, trained))
        options: dict[str, Any] = {
            "progress": progress(blueprint, state.step),
            "noise": seed,
            "pin": pin_rows(mesh),
        }
        if model.config.mod.adaptive:
            options["cuts"] = state.mod.get("cuts")
        with tracing_for(platform_of(mesh)):
            output = model(part.tokens, part.where, **options)
            with jax.named_scope("head"):
                objective, sums = head_loss(model, output, part, z_weight=train.z_loss, chunk=train.loss_chunk)
        extra = share * jnp.sum(part.segment_ids > 0) * auxiliary(model, output)
        return objective + extra, (sums, _cuts(model, output, part), jax.lax.stop_gradient(output.experts))

    def gradient(trained, part: Batch, seed, state: TrainState, share):
        """Gradients of the trained parameters, sharded like them, so that the sum over devices is scattered at once.
        `share` is the batch's targets divided by its tokens: it weighs the parts of a batch by tokens in the auxiliary
        loss, while the other losses weigh them by targets."""
        grads, rest = jax.grad(summed_loss, has_aux=True)(trained, part, seed, state, share)
        return jax.lax.with_sharding_constraint(grads, blueprint.trained(blueprint.parameter_shardings())), rest

    def step(state: TrainState, batch: Batch):
        share = jnp.sum(batch.weights) / jnp.maximum(jnp.sum(batch.segment_ids > 0), 1)
        trained, seeds = blueprint.trained(state.params), noise(state, train.accumulate)
        if train.accumulate == 1:
            grads, (sums, cuts, experts) = gradient(trained, batch, seeds[0], state, share)
        else:
            parts = jax.tree.map(lambda x: _parts(x, train.accumulate), batch)
            first = jax.tree.map(lambda x: x[0], parts)
            zeros = jax.eval_shape(lambda: gradient(trained, first, seeds[0], state, share))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)

            def add(total, part):
                return jax.tree.map(jnp.add, total, gradient(trained, *part, state, share)), None

            (grads, (sums, cuts, experts)), _ = jax.lax.scan(add, zeros, (parts, seeds))
        count = jnp.maximum(sums.count, 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        with jax.named_scope("optimizer"):
            updates, optimizer = blueprint.optimizer.update(grads, state.optimizer, trained)
            trained = blueprint.constrained(optax.apply_updates(trained, updates))
            params = blueprint.with_trained(state.params, trained)
            if moe.bias_rate and balanced:
                params = _balanced(params, state.params, experts["load"], moe.bias_rate)
        mod = _averaged(state, cuts, blueprint.config.model.mod)
        loss, accuracy, grad_norm = sums.nats / sums.count, sums.correct / sums.count, optax.tree.norm(grads)
        lr = jnp.float32(rate(state.guard.good))
        new = state._replace(step=state.step + 1, params=params, optimizer=optimizer, mod=mod)
        with jax.named_scope("optimizer"):
            if train.ema:
                average = _mixed(state.average, params, state.guard.good, train.ema)
                part = blueprint.constrained(blueprint.trained(average))  # means of unit vectors are shorter
                new = new._replace(average=blueprint.with_trained(average, part))
            new = guarded(state, new, loss, grad_norm, sums.count, train.spike)
        skipped = jnp.asarray(1.0 - cuts.ran / jnp.maximum(cuts.pairs, 1.0)) if isinstance(cuts, Pool) else None
        bad = jnp.where(sums.count == 0, 0, new.guard.bad)  # the guard still counts the bad steps before this one
        found = loss, accuracy, grad_norm, lr, sums.count, skipped, bad
        return new, StepMetrics(*found, *(balance_of(experts) if moe.experts else ()))

    return shard_rows(step, mesh, row_axes(mesh)) if mesh.size > 1 else step


def _joined(parts: EvalSums) -> EvalSums:
    """The sums and means of a whole batch from those of its parts, stacked along a first axis."""
    tokens = jnp.sum(parts.tokens)
    share = parts.tokens / jnp.maximum(tokens, 1)

    def mean(x: Array) -> Array:
        own = share.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.sum(jnp.where(own > 0, own * x, 0.0), 0)

    telemetry, routing = jax.tree.map(mean, (parts.telemetry, parts.routing))
    return EvalSums(*jax.tree.map(lambda x: jnp.sum(x, 0), (parts.sums, parts.bytes)), tokens, telemetry, routing)


def _parts(x: Array, n: int) -> Array:
    """Reshapes [B, ...] to [n, B/n, ...], with every part spread over the same devices as the whole."""
    return x.reshape(x.shape[0] // n, n, *x.shape[1:]).swapaxes(0, 1)


def jit_train_step(blueprint: Blueprint):
    """The jitted training step on the mesh. It donates the old state, whose memory the new one takes."""
    shardings = blueprint.shardings()
    return jax.jit(
        train_step(blueprint),
        in_shardings=(shardings, batch_sharding(blueprint.mesh)),
        out_shardings=(shardings, replicated(blueprint.mesh)),
        donate_argnums=0,
    )


@functools.lru_cache(maxsize=8)  # an open run is evaluated several times
def jit_eval_step(blueprint: ModelBlueprint, *, causal: bool = False):
    """The jitted evaluation step: `(params, mod state, steps done, batch, token_bytes [V]) -> EvalSums`.

    Tokens are routed by top-k, or with `causal` by the run's causal decider. With accumulation the batch is processed
    in as many parts as in training, because that is known to fit into memory.
    """
    mesh = blueprint.mesh

    def step(params: Any, mod: dict, done: Int[Array, ""], batch: Batch, token_bytes: Float[Array, " V"]) -> EvalSums:
        run = functools.partial(measured, params, mod, done, token_bytes)
        rows = len(batch.tokens) // batch_parts(mesh.shape)  # on a device: there may be fewer than in training
        parts = math.gcd(blueprint.config.train.accumulate, rows)
        if parts == 1:
            return run(batch)
        every = jax.tree.map(lambda x: _parts(x, parts), batch)
        return _joined(jax.lax.scan(lambda _, part: (None, run(part)), None, every)[1])

    def measured(params: Any, mod: dict, done: Int[Array, ""], token_bytes: Float[Array, " V"], batch: Batch):
        model = blueprint.model(params)
        options: dict[str, Any] = {"progress": progress(blueprint, done), "pin": pin_rows(mesh), "observed": True}
        with tracing_for(platform_of(mesh)):
            output = model(batch.tokens, batch.where, cuts=mod.get("cuts"), causal=causal, **options)
            with jax.named_scope("head"):
                _, sums = head_loss(model, output, batch, chunk=blueprint.config.train.loss_chunk)
        weights = batch.weights.astype(jnp.float32)
        read = jnp.sum(weights * token_bytes[batch.targets])
        return EvalSums(sums, read, jnp.sum(batch.segment_ids > 0), output.telemetry or {}, output.routing)

    spread = shard_rows(step, mesh, row_axes(mesh)) if mesh.size > 1 else step
    whole = replicated(mesh)
    params = blueprint.parameter_shardings() if mesh.size > 1 else whole  # in any form, such as int8
    return jax.jit(spread, in_shardings=(params, whole, whole, batch_sharding(mesh), whole), out_shardings=whole)
