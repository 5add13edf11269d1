"""The training step for runs on several hosts, which also tells every host what the others ask for."""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nagjax.train.distributed.mesh import batch_sharding, replicated
from nagjax.train.loss import Batch
from nagjax.train.state import Blueprint, TrainState
from nagjax.train.step import StepMetrics, train_step


class Ballot(NamedTuple):
    """The requests of a host; after the vote, each field is the maximum over all hosts."""

    signal: int = 0  # number of the signal that asked this host to stop
    overdue: int = 0  # 1: `save_minutes` have passed
    failed: int = 0  # 1: a save in the background has failed
    lost: int = 0  # 1: another machine has taken over the run's folder


class VotingStep:
    """A training step that shares the hosts' ballots without making any host wait. The result of one step's vote is
    read into `known` once the next step has been dispatched, and so after the same step on every host.

    The ballots are reduced inside the step's own program. A separate program, running beside the step, could order its
    collectives differently against those of the step on each host.
    """

    def __init__(self, blueprint: Blueprint):
        shardings, mesh = blueprint.shardings(), blueprint.mesh
        whole, self._each = replicated(mesh), NamedSharding(mesh, P(mesh.axis_names))
        self._shape = (mesh.size, len(Ballot._fields))
        self._mine = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
        step = train_step(blueprint)
        self._step = jax.jit(
            lambda state, batch, ballots: (*step(state, batch), ballots.max(0)),
            in_shardings=(shardings, batch_sharding(mesh), self._each),
            out_shardings=(shardings, whole, whole),
            donate_argnums=0,
        )
        self.known, self._sent, self._just_saved = Ballot(), None, False

    def saved(self) -> None:
        """To be called after a save: votes already on their way then do not ask for another."""
        self.known, self._just_saved = self.known._replace(overdue=0), True

    def __call__(self, state: TrainState, batch: Batch, ballot: Ballot) -> tuple[TrainState, StepMetrics]:
        mine = np.tile(np.array(ballot, np.int32), (self._mine, 1))
        ballots = jax.make_array_from_process_local_data(self._each, mine, self._shape)
        state, metrics, answer = self._step(state, batch, ballots)
        if self._sent is not None:
            self.known = Ballot(*jax.device_get(self._sent.addressable_data(0)).tolist())
            if self._just_saved:
                self.saved()
        self._sent, self._just_saved = answer, False
        return state, metrics
