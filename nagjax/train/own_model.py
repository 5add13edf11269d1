"""Training a user's own model that holds a residual of nagjax: what the scheme requires of any optimizer."""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.core.meta import AxisMetadata
from jaxtyping import Array, Float

from nagjax.errors import UserError
from nagjax.mod.module import MixtureOfDepths
from nagjax.model.parametrization import Factors, Parametrization
from nagjax.model.transformer import Transformer
from nagjax.parameters import ROLES, Labelled
from nagjax.ranges import Count, check_value
from nagjax.residual import Scheme
from nagjax.residual.arguments import say
from nagjax.residual.module import Residual
from nagjax.residual.protocol import SublayerIndex
from nagjax.residual.stacks import VECTORS
from nagjax.runs.config import OptimizerConfig
from nagjax.runs.trained import check_freeze, is_trained
from nagjax.train.optimizer import check_schedule, make_optimizer

Tree = Any
Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of one parameter: the names of its last axes, the factors that follow from its role
    (`nagjax.parameters`), and the schemes that constrain it."""

    axes: tuple[str | None, ...]
    factors: Factors
    bound: tuple[Scheme, ...]
    trained: bool = True

    @property
    def role(self) -> str:
        return self.factors.role

    def brought(self, value: Float[Array, "..."]) -> Float[Array, "..."]:
        """The value projected to where those schemes constrain it."""
        for scheme in self.bound:
            value = scheme.constrain(value, self.axes, self.role)
        return value


def optimizer(
    tx: optax.GradientTransformation | OptimizerConfig, model: Tree, *, steps: int | None = None, hide: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Wraps `tx`, an optax chain or an OptimizerConfig of nagjax, so that it fits the residual schemes in a model.

    Gates learn at their scheme's relative rate (NAG: 1/12). Only matrices decay, not gates, gains, biases or tables.
    What a scheme constrains (nGPT: its matrices to unit norm) satisfies the constraint after every step. Use the result
    as any optax optimizer, in `nnx.Optimizer(model, nagjax.optimizer(tx, model), wrt=nnx.Param)` or with `init` and
    `update` on the parameters.

    model: an nnx module (also an `nnx.bridge.ToNNX`), or several in a tuple, list or dict; or the parameters that
    Linen's `init` has returned, before `unbox`. A scheme constrains the parameters to which its module is nearer than
    any other scheme's. Your own parameters have the role that they state (`nnx.Param(..., role="norm")`). Otherwise
    name and shape decide: a name with "embed" or "token" in it is a table; a bias, a scale and whatever has fewer than
    two axes does not decay; the rest are matrices. The axis along which sublayers are stacked does not count. tx: it
    sees zeros in place of the parameters that do not decay, so that any decay in it acts on zero. A chain that uses
    parameters otherwise (schedule-free, SAM, Adafactor's step sizes) needs `hide=False`, and
    `mask=nagjax.decays(model)` in its own decay. steps: the length of the training, required with an OptimizerConfig.

    In a `nagjax.Transformer` with a parametrization (muP, CompleteP) learning rates depend on role, width and depth, as
    AdamW needs them, so a chain's updates are multiplied by them. Its decay and epsilon remain the chain's own, as a
    warning says; an OptimizerConfig follows the parametrization in everything. In a model with LoRA only the adapters
    are trained; in any model, what the config's `freeze` names is not. What is not trained has no optimizer state.
    Balancing biases of experts (`moe.bias_rate`) have no gradient: `nagjax.layers.balance.moved_biases` moves them
    after a step.

    Muon orthogonalises the last two axes of a matrix; for Flax's attention, whose kernels have an axis of heads, it
    takes all heads together.

    Warns if a scheme has start factors that were never requested from its nnx module, and if Muon treats an array of
    more than two axes as a stack of matrices. Raises UserError if the model holds no residual; for an unknown role; for
    a `tx` that is neither a chain nor a config; for a config without `steps`, a chain with `steps`, or a config without
    `lr` for a Linen module; and for a `freeze` that names no parameter or all. `update` raises UserError without
    parameters, and for parameters that the model does not have.
    """
    if not isinstance(tx, OptimizerConfig):
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise UserError(
                "tx", type(tx).__name__, "give an optax chain, such as optax.adamw(3e-4), or an OptimizerConfig"
            )
        if steps is not None:
            raise UserError(
                "steps", steps, "is for an OptimizerConfig: a chain has a schedule of its own, leave it out"
            )
    parts = _parts(model)
    own = tx if isinstance(tx, OptimizerConfig) else None
    known = describe(model, muon=own is not None and own.optimizer == "muon", freeze=own.freeze if own else ())
    for _, scheme, module in parts:
        _say_what_is_missing(scheme, module, known)
    if isinstance(tx, OptimizerConfig):
        make = _from_config(tx, steps, known, parts)
    else:
        _say_what_a_chain_keeps(known)
        make = lambda params: tx  # noqa: E731
    hide, bound = hide and own is None, any(of.bound and of.trained for of in known.values())
    frozen = not all(of.trained for of in known.values())

    def seen(params: Tree) -> Tree:
        if not hide:
            return params
        return _map(known, lambda of, p: p if of.role == "matrix" else jnp.zeros_like(p), params)

    def of_trained(params: Tree) -> optax.GradientTransformation:
        if not frozen:
            return make(params)
        trained = _map(known, lambda of, _: of.trained, params)
        return optax.partition({True: make(params), False: optax.set_to_zero()}, trained)

    def init(params: Tree) -> Tree:
        return of_trained(params).init(seen(params))

    def update(updates: Tree, state: Tree, params: Tree | None = None, **extra: Any) -> tuple[Tree, Tree]:
        if params is None:
            raise UserError("params", None, "hand the parameters to update: update(grads, state, params)")
        inner = optax.with_extra_args_support(of_trained(params))
        updates, state = inner.update(updates, state, seen(params), **extra)
        if own is None:
            updates = _map(known, lambda of, u: u if of.factors.rate == 1.0 else of.factors.rate * u, updates)
        if bound:
            updates = _map(known, lambda of, u, p: of.brought(p + u) - p if of.trained else u, updates, params)
        return updates, state

    return optax.GradientTransformationExtraArgs(init, update)


def decays(model: Tree) -> Any:
    """A function for the `mask` of an optax decay. It takes a tree of parameters and returns a tree of bools, True for
    those that decay, the matrices.

    model: as for `optimizer`. Raises UserError if it holds no residual, and for an unknown role.
    """
    _parts(model)
    known = describe(model)
    return lambda params: _map(known, lambda of, _: of.role == "matrix", params)


def constrain(model: Tree) -> Tree:
    """Projects the parameters to where their schemes constrain them, before training starts (nGPT). The parameters of
    an nnx module change in place; for Linen's parameters, as `init` has returned them, the result is a new tree.

    model: as for `optimizer`. Raises UserError if it holds no residual, and for an unknown role.
    """
    _parts(model)
    known, leaves = describe(model), _leaves(model)
    if not any(isinstance(leaf, nnx.Variable) for _, leaf in leaves):
        return _map(known, Known.brought, model)
    for path, leaf in leaves:
        if isinstance(leaf, nnx.Param):
            leaf[...] = known[path].brought(leaf[...])
    return model


def describe(model: Tree, *, muon: bool = False, freeze: tuple[str, ...] = ()) -> dict[Path, Known]:
    """What is known of every parameter of a model, by its path; with `muon` also the axes of matrices with heads.
    Raises UserError for an unknown role, and as `nagjax.runs.trained.check_freeze` does."""
    parts, known = _residuals(model), {}
    stacked = _stacked(model, {module.sublayers for _, _, module in parts if isinstance(module, Residual)})
    adapted = [prefix for prefix, _, module in parts if isinstance(module, Transformer) and module.config.lora.rank]
    tables = [Parametrization.of(m.config, s) if isinstance(m, Transformer) else None for _, s, m in parts]
    for path, leaf in _leaves(model):
        if isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.Param):
            continue
        facts = leaf.get_metadata() if isinstance(leaf, nnx.Variable) else {}
        if isinstance(leaf, AxisMetadata):  # Linen's box around a parameter
            facts = {"axes": getattr(leaf, "names", ()), "role": getattr(leaf, "role", None)}
        axes = facts.get("axes") or facts.get("out_sharding") or ()
        role = facts.get("role") or _guessed(path, leaf, stacked)
        if role not in ROLES:
            raise UserError("role", role, f"of {'/'.join(path)}: choose one of {', '.join(ROLES)}")
        table, own_rate, in_block = Parametrization(), 1.0, True
        for (prefix, scheme, _), own in zip(parts, tables, strict=True):
            if path[: len(prefix)] == prefix:
                own_rate = scheme.gate_rate if role == "gate" else 1.0
                table, in_block = (own, path[len(prefix)] == "blocks") if own else (table, in_block)
        factors = table.factors(role, tuple(axes), muon=muon, own_rate=own_rate, in_block=in_block)
        lora = any(path[: len(prefix)] == prefix for prefix in adapted)
        trained = is_trained(".".join(path), role, freeze, lora)
        known[path] = Known(tuple(axes), factors, _bound(path, parts), trained)
    check_freeze({".".join(path): of for path, of in known.items()}, freeze)
    return _of_heads(known, model, [prefix for prefix, _, _ in parts]) if muon else known


def _of_heads(known: dict[Path, Known], model: Tree, ours: list[Path]) -> dict[Path, Known]:
    """Adds which axes of Flax's attention kernels are inputs and outputs: [D, H, Dh] for query, key and value, and [H,
    Dh, D] for out. Prints which other arrays Muon takes for stacks of matrices. In the modules `ours` the names of the
    axes tell."""
    shapes = {path: jnp.shape(jax.tree.leaves(leaf)[0]) for path, leaf in _leaves(model) if path in known}
    found, stacks = dict(known), []
    for path, of in known.items():
        shape = shapes[path]
        if of.role != "matrix" or len(shape) < 3 or any(path[: len(prefix)] == prefix for prefix in ours):
            continue
        first, last = (shapes.get((*path[:-2], name, path[-1]), ()) for name in ("query", "out"))
        module = path[-2] if len(path) > 1 else ""
        if module in ("query", "key", "value", "out") and first and first[-2:] == last[-3:-1]:
            inputs, outputs = ((-3, -2), (-1,)) if module == "out" else ((-3,), (-2, -1))
            factors = dataclasses.replace(of.factors, inputs=inputs, outputs=outputs)
            found[path] = dataclasses.replace(of, factors=factors)
        else:
            stacks.append(f"{'.'.join(path)} {list(shape)}")
    if stacks:
        say(f"Muon takes these for stacks of matrices, which are their last two axes: {', '.join(stacks)}")
    return found


def _bound(path: Path, parts: list[tuple[Path, Scheme, Any]]) -> tuple[Scheme, ...]:
    """The schemes that constrain the parameter at this path: those nearest to it, of which some may constrain
    nothing."""
    shared = [len(os.path.commonprefix([path, prefix])) for prefix, _, _ in parts]
    nearest = [scheme for (_, scheme, _), own in zip(parts, shared, strict=True) if own == max(shared)]
    return tuple(dict.fromkeys(scheme for scheme in nearest if scheme.constrains))


def _guessed(path: Path, leaf: Any, stacked: set[Path]) -> str:
    name = path[-1].lower()
    if "embed" in name or "token" in name:
        return "embedding"
    axes = jnp.ndim(jax.tree.leaves(leaf)[0]) - any(path[:end] in stacked for end in range(1, len(path)))
    return "norm" if name in VECTORS or axes < 2 else "matrix"


def _stacked(model: Tree, sublayers: set[int]) -> set[Path]:
    """The paths of modules that stand for several stacked sublayers. All parameters of such a module have the same
    first axis, whose length divides a number of sublayers, and one that is a vector by its name has two axes."""
    modules: dict[Path, list[tuple[str, tuple[int, ...]]]] = {}
    for path, leaf in _leaves(model):
        if not isinstance(leaf, nnx.Variable) or isinstance(leaf, nnx.Param):
            shape = jnp.shape(jax.tree.leaves(leaf)[0])
            for end in range(1, len(path)):
                modules.setdefault(path[:end], []).append((path[-1].lower(), shape))
    found = set()
    for path, own in modules.items():
        lengths = {shape[:1] for _, shape in own}
        shared = lengths.pop() if len(lengths) == 1 else ()
        vectors = any(name in VECTORS and len(shape) == 2 for name, shape in own)
        if vectors and shared and any(count % shared[0] == 0 for count in sublayers):
            found.add(path)
    return found


def _parts(model: Tree) -> list[tuple[Path, Scheme, Any]]:
    """`_residuals`; raises UserError where there are none."""
    if parts := _residuals(model):
        return parts
    fix = "holds no residual of nagjax: hand over the model itself, or Linen's parameters before unbox"
    if any(isinstance(leaf, nnx.Module) for leaf in jax.tree.leaves(model)):
        fix = "is not a pytree (pytree=False), so nothing in it is seen: leave that out, keep modules in nnx.List"
    raise UserError("model", type(model).__name__, fix)


def _residuals(model: Tree) -> list[tuple[Path, Scheme, Any]]:
    """The paths of a model's residuals, their schemes, and their modules (None in Linen, where only parameters are
    there)."""
    found = []
    for keys, part in jax.tree_util.tree_flatten_with_path(model, is_leaf=lambda x: isinstance(x, _HOLDERS))[0]:
        own = part.residual if isinstance(part, MixtureOfDepths) else part
        if isinstance(own, Residual | Transformer):
            found.append((_names(keys), own.scheme, own))
        elif (scheme := _said_by(part)) and _names(keys)[:-1] not in [path for path, _, _ in found]:
            found.append((_names(keys)[:-1], scheme, None))
    return found


_HOLDERS = (Residual, MixtureOfDepths, Transformer, Labelled, nnx.Variable)


def _said_by(part: Any) -> Scheme | None:
    """The scheme that a Linen parameter names, in its box or in the variable that `nnx.bridge` makes of it."""
    if isinstance(part, nnx.Variable):
        return part.get_metadata().get("scheme")
    return part.scheme if isinstance(part, Labelled) else None


def _leaves(tree: Tree) -> list[tuple[Path, Any]]:
    whole = lambda x: isinstance(x, nnx.Variable | AxisMetadata)  # noqa: E731
    return [(_names(keys), leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=whole)[0]]


def _names(keys: tuple) -> Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _map(known: dict[Path, Known], fn: Any, tree: Tree, *rest: Tree) -> Tree:
    """`fn(known, leaf, ...)` over a tree of parameters, whether its leaves are arrays, variables or boxes."""

    def one(keys: tuple, *leaves: Array) -> Array:
        path = _names(keys)
        of = known.get(path) or known.get(path[:-1])  # or the array is the value of a variable or a box
        if of is None:
            fix = "is not in the model that nagjax.optimizer was given: hand it all that is trained"
            if ("params", *path) in known or path[1:] in known:
                fix = "nagjax.optimizer was given it at another level: hand both with the level 'params', or without"
            raise UserError("params", "/".join(path), fix)
        return fn(of, *leaves)

    return jax.tree_util.tree_map_with_path(one, tree, *rest)


def _from_config(config: OptimizerConfig, steps: int | None, known: dict[Path, Known], parts: list) -> Any:
    if steps is None:
        raise UserError("steps", None, "give the number of training steps: the schedule of OptimizerConfig needs it")
    check_value("steps", steps, Count)
    check_schedule(config)
    scheme, module = parts[0][1:]
    if isinstance(module, Transformer):
        peak = config.peak(scheme, module.config)
    elif config.lr is None and not isinstance(module, Residual):
        raise UserError("lr", None, "give OptimizerConfig a learning rate: only of an nnx residual the size is known")
    else:
        peak = config.lr or scheme.default_rate(module.width, (module.sublayers + 1) // 2)
    own = lambda of, _: of.factors if of.trained else optax.MaskedNode()  # noqa: E731
    factors = lambda params: _map(known, own, params)  # noqa: E731
    return lambda params: make_optimizer(config, peak, steps, factors(params))


def _say_what_a_chain_keeps(known: dict[Path, Known]) -> None:
    if any(of.role == "matrix" and of.factors.decay != 1.0 or of.factors.epsilon != 1.0 for of in known.values()):
        fix = "hand nagjax.optimizer an OptimizerConfig for those too"
        say(f"the parametrization sets the learning rates of your chain, not its weight decay and epsilon: {fix}")


def _say_what_is_missing(scheme: Scheme, module: Any, known: dict[Path, Known]) -> None:
    if isinstance(module, Residual) and not module.asked.start_factors:
        places = [SublayerIndex(i, module.sublayers) for i in (1, module.sublayers)]
        factors = [(float(scheme.output_scale(place)), float(scheme.inner_scale(place))) for place in places]
        if any(factor != 1.0 for pair in factors for factor in pair):
            last = f"output {factors[-1][0]:.3g}, inner {factors[-1][1]:.3g}"
            fix = "scale your branches' initial values by nagjax.start_factors(residual, i)"
            also = " (or turn them off: scaled_start=False)" if "scaled_start" in dataclasses.asdict(scheme) else ""
            say(f"{scheme.name} has start factors for its branches (of the last: {last}): {fix}{also}")
    if scheme.constrains and not isinstance(module, Transformer):
        mine = [of for of in known.values() if scheme in of.bound and of.role == "matrix"]
        unnamed = sum("embed" not in of.axes for of in mine)
        if unnamed:
            how = 'with_partitioning(init, ("embed", None)) of Linen, or of nnx with eager_sharding=False'
            fix = f"name the axis that the residual is on: {how}"
            say(f"{scheme.name} normalises matrices along the residual's axis, {unnamed} of yours name no such: {fix}")
