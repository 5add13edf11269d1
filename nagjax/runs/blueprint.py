"""A model and its parameters on a mesh, without their values: what is needed to open a run."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from nagjax.model.transformer import Transformer
from nagjax.runs.config import RunConfig
from nagjax.runs.trained import marked, trained_part, with_part
from nagjax.train.distributed.mesh import check_experts, check_sequence, parameter_sharding, replicated

Tree = Any


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Everything about one parameter except its value."""

    axes: tuple[str | None, ...]
    role: str
    shape: tuple[int, ...]
    trained: bool = True  # in this run

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelBlueprint:
    """The static part of a run's model: its graph and its parameters' metadata, on a mesh. Compiled programs are cached
    per blueprint, and a blueprint is equal only to itself."""

    config: RunConfig
    mesh: Mesh
    graph: nnx.GraphDef
    parameters: Tree  # of Parameter

    @classmethod
    def of(cls, config: RunConfig, mesh: Mesh) -> "ModelBlueprint":
        """The blueprint of a config's model. Raises UserError if the mesh cannot split its sequences or experts."""
        check_sequence(config.model, mesh.shape)
        check_experts(config.model, mesh.shape)
        graph, abstract = nnx.split(nnx.eval_shape(lambda: build_model(config, 0)))
        described = jax.tree.map(
            lambda variable: Parameter(
                variable.get_metadata()["axes"], variable.get_metadata()["role"], variable.shape
            ),
            abstract,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
        freeze, lora = config.optimizer.freeze, config.model.lora.rank > 0
        return cls(config, mesh, graph, marked(nnx.to_pure_dict(described), freeze, lora))

    def __repr__(self) -> str:
        model, count = self.config.model, sum(p.size for p in jax.tree.leaves(self.parameters))
        size = f"{model.depth} blocks x {model.width}, {count:,} parameters"
        return f"{type(self).__name__}({self.config.scheme.title}, {size}, mesh {dict(self.mesh.shape)})"

    def model(self, params: Tree) -> Transformer:
        return nnx.merge(self.graph, params)

    def trained(self, tree: Tree) -> Tree:
        """The trained leaves of a tree shaped like the parameters."""
        return trained_part(tree, self.parameters)

    def with_trained(self, params: Tree, part: Tree) -> Tree:
        """The parameters with their trained leaves replaced by `part`."""
        return part if self.trained(params) is params else with_part(params, part)

    def init_params(self, seed: int) -> Tree:
        """Initial values, a nested dict of float32 arrays; to be called under jit."""
        return _constrained(self.config, nnx.to_pure_dict(nnx.state(build_model(self.config, seed))), self.parameters)

    def create_params(self) -> Tree:
        """The run's initial values, each shard of which is made on its own device."""
        make = jax.jit(lambda: self.init_params(self.config.train.seed), out_shardings=self.parameter_shardings())
        return make()

    def constrained(self, part: Tree) -> Tree:
        """The trained parameters `part`, projected by the scheme's `constrain`."""
        return _constrained(self.config, part, self.trained(self.parameters))

    def parameter_shardings(self) -> Tree:
        return jax.tree.map(lambda p: parameter_sharding(self.mesh, p.axes, p.shape), self.parameters)

    def init_mod(self) -> dict[str, jax.Array]:
        """The state of Mixture-of-Depths before the first step: `cuts` [S], float32, all -inf; with adaptive depth also
        `debt`, a scalar (see `nagjax.mod.adaptive`). Empty without routing."""
        model = self.config.model
        cuts = {"cuts": jnp.full(model.sublayers, -jnp.inf, jnp.float32)} if model.mod.active else {}
        return cuts | {"debt": jnp.float32(0.0)} if cuts and model.mod.adaptive else cuts

    def abstract_params(self) -> Tree:
        """The parameters as `jax.ShapeDtypeStruct`s: shapes, dtype float32 and shardings."""
        return jax.tree.map(
            lambda p, sharding: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=sharding),
            self.parameters,
            self.parameter_shardings(),
        )

    @property
    def weights(self) -> str:
        """The name of the state's part that holds the weights to use: "average" if the run keeps one, else "params"."""
        return "average" if self.config.train.ema else "params"

    def abstract_use(self) -> dict[str, Tree]:
        """The parts of a checkpoint that using the model needs, as `jax.ShapeDtypeStruct`s: `step`, `mod`, and the part
        named by `weights`."""
        whole = replicated(self.mesh)
        rest = jax.eval_shape(lambda: {"step": jnp.int32(0), "mod": self.init_mod()})
        rest = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), rest)
        return {**rest, self.weights: self.abstract_params()}


def _constrained(config: RunConfig, values: Tree, parameters: Tree) -> Tree:
    bring = config.scheme.constrain
    return jax.tree.map(lambda value, known: bring(value, known.axes, known.role), values, parameters)


def build_model(config: RunConfig, seed: int) -> Transformer:
    return Transformer(config.model, config.scheme, nnx.Rngs(seed))
