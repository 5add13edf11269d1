"""The state of a run as one pytree, and its creation on a mesh."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, UInt32

from nagjax.model.parametrization import Factors, Parametrization
from nagjax.runs.blueprint import ModelBlueprint, Parameter, Tree
from nagjax.runs.config import RunConfig
from nagjax.runs.trained import check_freeze, with_part
from nagjax.train.distributed.mesh import replicated
from nagjax.train.optimizer import make_optimizer
from nagjax.train.safety.guard import Guard, new_guard


class TrainState(NamedTuple):
    """Everything a run needs to continue; its position in the data follows from the step (see `TrainBatches`)."""

    step: Int[Array, ""]  # steps done
    params: Tree  # nested dict of float32 arrays
    optimizer: Tree
    rng: UInt32[Array, "2"]  # key data
    mod: dict[str, Array]  # of Mixture-of-Depths, see `ModelBlueprint.init_mod`: `cuts` [S] and more; else empty
    guard: Guard  # judges steps
    average: Tree = {}  # of the parameters, if `train.ema` is set; else empty

    @property
    def weights(self) -> Tree:
        """The weights that evaluations and users of the run take: the average if one is kept, else the parameters."""
        return self.average or self.params


def factors(model: ModelBlueprint) -> Tree:
    """The `Factors` of every trained parameter, by which the parametrization and the scheme scale the optimizer's
    settings."""
    config = model.config
    table, muon = Parametrization.of(config.model, config.scheme), config.optimizer.optimizer == "muon"

    def one(path: tuple, parameter: Parameter) -> Factors:
        own_rate = config.scheme.gate_rate if parameter.role == "gate" else 1.0
        in_block = path[0].key == "blocks"
        return table.factors(parameter.role, parameter.axes, muon=muon, own_rate=own_rate, in_block=in_block)

    return jax.tree_util.tree_map_with_path(one, model.trained(model.parameters))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Blueprint(ModelBlueprint):
    """The static part of a run: its model's blueprint and the optimizer."""

    optimizer: optax.GradientTransformation

    @classmethod
    def of(cls, config: RunConfig, mesh: Mesh) -> "Blueprint":
        """The blueprint of a config. Raises UserError if the mesh cannot split the model's sequences, and if `freeze`
        names no parameter or all."""
        model = ModelBlueprint.of(config, mesh)
        check_freeze(model.parameters, config.optimizer.freeze)
        optimizer = make_optimizer(config.optimizer, config.learning_rate, config.train.steps, factors(model))
        return cls(config, mesh, model.graph, model.parameters, optimizer)

    def init(self, seed: int) -> TrainState:
        """A fresh state; to be called under jit."""
        return self._around(self.init_params(seed), seed)

    def _around(self, params: Tree, seed: int) -> TrainState:
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 1))
        moments = self.optimizer.init(self.trained(params))
        average = jax.tree.map(jnp.copy, params) if self.config.train.ema else {}  # a copy: both are donated
        return TrainState(jnp.int32(0), params, moments, key, self.init_mod(), new_guard(), average)

    def abstract(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s: shapes, dtypes and shardings."""
        shapes = jax.eval_shape(lambda params: self._around(params, 0), self.abstract_params())
        whole = replicated(self.mesh)
        params = self.parameter_shardings()
        masked = lambda leaf: isinstance(leaf, optax.MaskedNode)  # noqa: E731 (a parameter of another optimizer's)
        moments = optax.tree_utils.tree_map_params(
            self.optimizer,
            lambda moment, sharding: moment if masked(moment) else sharding,
            shapes.optimizer,
            self.trained(params),
            transform_non_params=lambda _: whole,
            is_leaf=masked,
        )
        rest = jax.tree.map(lambda _: whole, shapes)._asdict()
        average = params if self.config.train.ema else {}
        shardings = TrainState(**rest | {"params": params, "optimizer": moments, "average": average})
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings,
        )

    def shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract())

    def create(self, given: Tree | None = None) -> TrainState:
        """A fresh state, each shard of which is made on its own device. `given` holds the values of some parameters,
        and the state takes over their memory; the other parameters get initial values."""
        seed = self.config.train.seed

        def make(given: Tree) -> TrainState:
            return self._around(with_part(self.init_params(seed), given), seed)

        return jax.jit(make, out_shardings=self.shardings(), donate_argnums=0)(given or {})
