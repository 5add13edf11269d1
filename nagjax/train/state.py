"""The state of a run as one pytree, and how it is born on a mesh."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int, UInt32

from nagjax.model.transformer import Transformer
from nagjax.runs.config import RunConfig
from nagjax.train.distributed.mesh import check_sequence, parameter_sharding, replicated
from nagjax.train.optimizer import make_optimizer
from nagjax.train.safety.guard import Guard, new_guard

Tree = Any


class TrainState(NamedTuple):
    """Everything a run needs to go on; where it stands in the data follows from the step (see `TrainStream`)."""

    step: Int[Array, ""]  # steps done
    params: Tree  # nested dict of float32 arrays
    optimizer: Tree
    rng: UInt32[Array, "2"]  # key data
    mod: dict[str, Array]  # of Mixture-of-Depths: `cuts` [S], the average top-k cuts; empty without it
    guard: Guard  # what steps are judged by


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What is known of one parameter without its value."""

    axes: tuple[str | None, ...]
    role: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """The static side of a run: the model's graph, its parameters' metadata, the optimizer, all placed on a mesh."""

    config: RunConfig
    mesh: Mesh
    graph: nnx.GraphDef
    parameters: Tree  # of Parameter
    optimizer: optax.GradientTransformation

    @classmethod
    def of(cls, config: RunConfig, mesh: Mesh) -> "Blueprint":
        """Raises UserError for a model whose sequences cannot be split as the mesh does."""
        check_sequence(config.model, mesh.shape)
        graph, abstract = nnx.split(nnx.eval_shape(lambda: build_model(config, 0)))
        described = jax.tree.map(
            lambda variable: Parameter(
                variable.get_metadata()["axes"], variable.get_metadata()["role"], variable.shape
            ),
            abstract,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
        parameters = nnx.to_pure_dict(described)
        optimizer = make_optimizer(
            config.optimizer,
            config.learning_rate,
            config.train.steps,
            config.scheme.gate_rate,
            jax.tree.map(lambda p: p.role, parameters),
        )
        return cls(config, mesh, graph, parameters, optimizer)

    def __repr__(self) -> str:
        model, count = self.config.model, sum(math.prod(p.shape) for p in jax.tree.leaves(self.parameters))
        size = f"{model.depth} blocks x {model.width}, {count:,} parameters"
        return f"Blueprint({self.config.scheme.title}, {size}, mesh {dict(self.mesh.shape)})"

    def model(self, params: Tree) -> Transformer:
        return nnx.merge(self.graph, params)

    def init(self, seed: int) -> TrainState:
        """A fresh state; trace it under jit."""
        params = self.constrained(nnx.to_pure_dict(nnx.state(build_model(self.config, seed))))
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 1))
        model = self.config.model
        mod = {"cuts": jnp.zeros(model.sublayers)} if model.mod.active else {}
        return TrainState(jnp.int32(0), params, self.optimizer.init(params), key, mod, new_guard())

    def constrained(self, params: Tree) -> Tree:
        """The parameters where the scheme wants them to lie."""
        bring = self.config.scheme.constrain
        return jax.tree.map(lambda value, known: bring(value, known.axes, known.role), params, self.parameters)

    def parameter_shardings(self) -> Tree:
        return jax.tree.map(lambda p: parameter_sharding(self.mesh, p.axes, p.shape), self.parameters)

    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        shapes = jax.eval_shape(lambda: self.init(0))
        whole = replicated(self.mesh)
        params = self.parameter_shardings()
        masked = lambda leaf: isinstance(leaf, optax.MaskedNode)  # noqa: E731 (a parameter of another optimizer's)
        moments = optax.tree_utils.tree_map_params(
            self.optimizer,
            lambda moment, sharding: moment if masked(moment) else sharding,
            shapes.optimizer,
            params,
            transform_non_params=lambda _: whole,
            is_leaf=masked,
        )
        rest = jax.tree.map(lambda _: whole, shapes)._asdict()
        shardings = TrainState(**rest | {"params": params, "optimizer": moments})
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings,
        )

    def shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract())

    def create(self) -> TrainState:
        """A fresh state, each shard made where it lives."""
        return jax.jit(lambda: self.init(self.config.train.seed), out_shardings=self.shardings())()


def build_model(config: RunConfig, seed: int) -> Transformer:
    return Transformer(config.model, config.scheme, nnx.Rngs(seed))
