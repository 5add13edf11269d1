"""Teachers, and the training of students (harness/students.py), in the inverse-depth toy.

    x <- rms(x);   l times: x <- x + W2 relu(W1 rms(x) + b1)^2;   x <- rms(x);   logits = W x / T

Liu, Kangaslahti, Liu & Gore 2026, arXiv:2602.05970, with the initial values of its released code.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from experiments.harness.students import KINDS, WIDTH, linear, start_blocks

VOCAB = 128


class Student(NamedTuple):
    blocks: Any  # of the student's kind
    head: Float[Array, "D V"]


@dataclasses.dataclass(frozen=True)
class Regime:
    """One experiment. Rates are those of Adam; `decay` keeps them constant for 80% of the steps, then lowers them to a
    tenth."""

    tied: bool  # all blocks of the teacher are equal
    loss: Literal["kl", "mse"] = "mse"  # of the logits, or of the final states, without a head
    given_head: bool = False  # the student uses the teacher's head and temperature
    student: str = "ordinary"  # its kind; in midpoint students two of the l MLPs make one step
    teacher_depth: int = 128
    rate: float = 1.2e-3  # multiplied by 1/sqrt(l) if it decays
    decay: bool = True


REGIMES = {
    "independent, KL": Regime(tied=False, loss="kl", rate=6e-4, decay=False),
    "tied, KL": Regime(tied=True, loss="kl", rate=6e-4, decay=False),
    "tied, KL, given head": Regime(tied=True, loss="kl", given_head=True, rate=2.4e-3),
    "independent": Regime(tied=False),
    "tied": Regime(tied=True),
    "tied, Runge-Kutta": Regime(tied=True, student="midpoint"),
    "independent, 24 blocks": Regime(tied=False, teacher_depth=24),
    "tied, 24 blocks": Regime(tied=True, teacher_depth=24),
}


def start_teacher(key: Array, regime: Regime) -> Student:
    blocks, head = jax.random.split(key)
    depth = regime.teacher_depth
    made = start_blocks(blocks, 1 if regime.tied else depth, depth**-0.5)
    made = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (depth, *leaf.shape[1:])), made)
    normal = jax.random.normal(head, (WIDTH, VOCAB)) * WIDTH**-0.5
    return Student(made, normal if regime.given_head else linear(head, WIDTH, WIDTH, VOCAB))


def start_student(key: Array, depth: int, kind: str = "ordinary") -> Student:
    return Student(KINDS[kind].start(key, depth), jnp.zeros((WIDTH, VOCAB)))


def states(teacher: Student, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """The final normalised states of a teacher."""
    return KINDS["ordinary"].states(teacher.blocks, x)


def loss(
    student: Student, teacher: Student, x: Float[Array, "B D"], target: Float[Array, "B D"], t: Array, regime: Regime
) -> Float[Array, ""]:
    """The student's loss, given the teacher's final states `target`; `t` is the temperature."""
    found = KINDS[regime.student].states(student.blocks, x)
    if regime.loss == "mse":
        return jnp.mean((found - target) ** 2)
    own = found @ (teacher.head / t if regime.given_head else student.head)
    wanted = jax.nn.log_softmax(target @ teacher.head / t)
    return jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - jax.nn.log_softmax(own)), axis=-1))


@dataclasses.dataclass(frozen=True)
class Toy:
    """Students of every depth, for every arm and teacher, trained side by side on the same fresh inputs. The arms are
    all combinations of temperatures and factors on the learning rates, the factors varying fastest."""

    regime: Regime
    depths: tuple[int, ...]
    temperatures: tuple[float, ...]
    teachers: int
    batch: int
    steps: int
    test_batches: int
    seed: int = 0
    faster: float = 1.0  # factor on the learning rates, for runs far shorter than the paper's
    factors: tuple[float, ...] = (1.0,)  # multiplied with it; one arm each

    def train(self) -> dict[int, Float[np.ndarray, "teachers arms"]]:
        """The test loss on fresh inputs, by student depth."""
        keys = jax.random.split(jax.random.key(self.seed), self.teachers)
        return {depth: np.asarray(own) for depth, own in jax.jit(jax.vmap(self._one_teacher))(keys).items()}

    def _one_teacher(self, key: Array) -> dict[int, Float[Array, " arms"]]:
        teacher_key, student_key, data_key = jax.random.split(key, 3)
        teacher = start_teacher(teacher_key, self.regime)
        arms = jnp.asarray(list(itertools.product(self.temperatures, self.factors)))

        def start(depth: int, key: Array):
            student = start_student(key, depth, self.regime.student)
            return student, self._adam(depth, 1.0).init(student)

        runs = {}
        for depth in self.depths:
            fresh = jax.random.split(jax.random.fold_in(student_key, depth), len(arms))
            runs[depth] = jax.vmap(lambda key, depth=depth: start(depth, key))(fresh)

        def inputs(step):
            x = jax.random.normal(jax.random.fold_in(data_key, step), (self.batch, WIDTH))
            return x, states(teacher, x)

        def update(runs, step):
            x, target = inputs(step)  # the same for all students

            def one(depth, student, moments, arm):
                gradient = jax.grad(loss)(student, teacher, x, target, arm[0], self.regime)
                change, moments = self._adam(depth, arm[1]).update(gradient, moments)
                return optax.apply_updates(student, change), moments

            every = lambda depth: jax.vmap(lambda run, arm: one(depth, *run, arm))  # noqa: E731
            return {depth: every(depth)(run, arms) for depth, run in runs.items()}, None

        def test(total, step):
            x, target = inputs(step)
            judge = jax.vmap(lambda student, arm: loss(student, teacher, x, target, arm[0], self.regime))
            return {depth: total[depth] + judge(run[0], arms) for depth, run in runs.items()}, None

        runs, _ = jax.lax.scan(update, runs, jnp.arange(self.steps))
        zeros = {depth: jnp.zeros(len(arms)) for depth in self.depths}
        total, _ = jax.lax.scan(test, zeros, self.steps + jnp.arange(self.test_batches))
        return jax.tree.map(lambda sum: sum / self.test_batches, total)

    def _adam(self, depth: int, factor: float | Float[Array, ""]) -> optax.GradientTransformation:
        """Adam with each parameter's own rate."""
        rates = Student(KINDS[self.regime.student].rates, 1.0)

        def relative(updates, _):
            return jax.tree.map(lambda rate, own: jax.tree.map(lambda u: factor * rate * u, own), rates, updates)

        return optax.chain(
            optax.scale_by_adam(), optax.stateless(relative), optax.scale_by_learning_rate(self._rate(depth))
        )

    def _rate(self, depth: int) -> optax.Schedule:
        peak = self.faster * self.regime.rate
        if not self.regime.decay:
            return optax.constant_schedule(peak)
        peak, turn = peak * depth**-0.5, round(0.8 * self.steps)
        fall = optax.linear_schedule(peak, 0.1 * peak, max(self.steps - turn, 1))
        return optax.join_schedules([optax.constant_schedule(peak), fall], [turn])


@dataclasses.dataclass(frozen=True)
class ToyTraining:
    """A job: test losses [teachers, arms] by student depth."""

    name: str
    labels: dict
    toy: Toy

    def config(self) -> dict:
        return dataclasses.asdict(self.toy)

    def run(self, folder: Path) -> dict:
        found = self.toy.train()
        return {"losses": {str(depth): own.tolist() for depth, own in found.items()}}
