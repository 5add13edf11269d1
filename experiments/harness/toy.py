"""Teacher and student of the inverse-depth toy: residual networks of squared-ReLU blocks on Gaussian inputs.

    x <- rms(x);   l times: x <- x + W2 relu(W1 rms(x) + b1)^2;   x <- rms(x);   logits = W x / T

`rms` has no gain. Liu, Kangaslahti, Liu & Gore 2026, arXiv:2602.05970, with the start values of its released code
(those of torch's Linear): everything uniform in +-1/sqrt(fan in).
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

WIDTH, HIDDEN, VOCAB = 32, 128, 128


class Blocks(NamedTuple):
    """Stacked blocks."""

    up: Float[Array, "L D F"]
    bias: Float[Array, "L F"]
    down: Float[Array, "L F D"]


class Student(NamedTuple):
    blocks: Blocks
    head: Float[Array, "D V"]


@dataclasses.dataclass(frozen=True)
class Regime:
    """One experiment. Rates are those of Adam; `decay` keeps them to 80% of the steps, then falls to a tenth."""

    tied: bool  # all blocks of the teacher are the same
    loss: Literal["kl", "mse"] = "mse"  # of the logits, or of the final states, without a head
    given_head: bool = False  # the student has the teacher's head, and its temperature
    runge_kutta: bool = False  # second-order student: two of its l MLPs make a step
    teacher_depth: int = 128
    rate: float = 1.2e-3  # times 1/sqrt(l) where it decays
    decay: bool = True


REGIMES = {
    "independent, KL": Regime(tied=False, loss="kl", rate=6e-4, decay=False),
    "tied, KL": Regime(tied=True, loss="kl", rate=6e-4, decay=False),
    "tied, KL, given head": Regime(tied=True, loss="kl", given_head=True, rate=2.4e-3),
    "independent": Regime(tied=False),
    "tied": Regime(tied=True),
    "tied, Runge-Kutta": Regime(tied=True, runge_kutta=True),
    "independent, 24 blocks": Regime(tied=False, teacher_depth=24),
    "tied, 24 blocks": Regime(tied=True, teacher_depth=24),
}


def rms(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def branch(block: Blocks, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
    return jax.nn.relu(rms(x) @ block.up + block.bias) ** 2 @ block.down


def states(blocks: Blocks, x: Float[Array, "B D"], runge_kutta: bool = False) -> Float[Array, "B D"]:
    """Final normalised states. Second order: `x <- x + f2(x + f1(x)/2)`, blocks 2i and 2i+1 being f1 and f2."""

    def euler(x, block):
        return x + branch(block, x), None

    def midpoint(x, pair):
        first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], pair) for i in (0, 1))
        return x + branch(second, x + branch(first, x) / 2), None

    if runge_kutta:
        pairs = jax.tree.map(lambda leaf: leaf.reshape(-1, 2, *leaf.shape[1:]), blocks)
        return rms(jax.lax.scan(midpoint, rms(x), pairs)[0])
    return rms(jax.lax.scan(euler, rms(x), blocks)[0])


def linear(key: Array, fan_in: int, *shape: int) -> Array:
    return jax.random.uniform(key, shape, minval=-(fan_in**-0.5), maxval=fan_in**-0.5)


def start_blocks(key: Array, depth: int, scale: float) -> Blocks:
    """`scale` is on the down projections: zero for students, 1/sqrt(depth) for teachers."""
    up, bias, down = jax.random.split(key, 3)
    return Blocks(
        linear(up, WIDTH, depth, WIDTH, HIDDEN),
        linear(bias, WIDTH, depth, HIDDEN),
        scale * linear(down, HIDDEN, depth, HIDDEN, WIDTH),
    )


def start_teacher(key: Array, regime: Regime) -> Student:
    blocks, head = jax.random.split(key)
    depth = regime.teacher_depth
    made = start_blocks(blocks, 1 if regime.tied else depth, depth**-0.5)
    made = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (depth, *leaf.shape[1:])), made)
    normal = jax.random.normal(head, (WIDTH, VOCAB)) * WIDTH**-0.5
    return Student(made, normal if regime.given_head else linear(head, WIDTH, WIDTH, VOCAB))


def start_student(key: Array, depth: int) -> Student:
    return Student(start_blocks(key, depth, 0.0), jnp.zeros((WIDTH, VOCAB)))


def loss(
    student: Student, teacher: Student, x: Float[Array, "B D"], target: Float[Array, "B D"], t: Array, regime: Regime
) -> Float[Array, ""]:
    """Of the student, where the teacher's final states are `target`; `t` is the temperature."""
    found = states(student.blocks, x, regime.runge_kutta)
    if regime.loss == "mse":
        return jnp.mean((found - target) ** 2)
    own = found @ (teacher.head / t if regime.given_head else student.head)
    wanted = jax.nn.log_softmax(target @ teacher.head / t)
    return jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - jax.nn.log_softmax(own)), axis=-1))


@dataclasses.dataclass(frozen=True)
class Toy:
    """Students of every depth, for every temperature and teacher, trained side by side on the same fresh inputs."""

    regime: Regime
    depths: tuple[int, ...]
    temperatures: tuple[float, ...]
    teachers: int
    batch: int
    steps: int
    test_batches: int
    seed: int = 0
    faster: float = 1.0  # factor on the learning rates, for runs far shorter than the paper's

    def train(self) -> dict[int, Float[np.ndarray, "teachers temperatures"]]:
        """Test loss by student depth, on fresh inputs."""
        keys = jax.random.split(jax.random.key(self.seed), self.teachers)
        return {depth: np.asarray(own) for depth, own in jax.jit(jax.vmap(self._one_teacher))(keys).items()}

    def _one_teacher(self, key: Array) -> dict[int, Float[Array, " temperatures"]]:
        teacher_key, student_key, data_key = jax.random.split(key, 3)
        teacher, t = start_teacher(teacher_key, self.regime), jnp.asarray(self.temperatures)
        adams = {depth: optax.adam(self._rate(depth)) for depth in self.depths}

        def start(depth: int, key: Array):
            student = start_student(key, depth)
            return student, adams[depth].init(student)

        runs = {}
        for depth in self.depths:
            fresh = jax.random.split(jax.random.fold_in(student_key, depth), len(self.temperatures))
            runs[depth] = jax.vmap(lambda key, depth=depth: start(depth, key))(fresh)

        def inputs(step):
            x = jax.random.normal(jax.random.fold_in(data_key, step), (self.batch, WIDTH))
            return x, states(teacher.blocks, x)

        def update(runs, step):
            x, target = inputs(step)  # once for all students

            def one(depth, student, moments, t):
                gradient = jax.grad(loss)(student, teacher, x, target, t, self.regime)
                change, moments = adams[depth].update(gradient, moments)
                return optax.apply_updates(student, change), moments

            every = lambda depth: jax.vmap(lambda run, t: one(depth, *run, t))  # noqa: E731
            return {depth: every(depth)(run, t) for depth, run in runs.items()}, None

        def test(total, step):
            x, target = inputs(step)
            judge = jax.vmap(lambda student, t: loss(student, teacher, x, target, t, self.regime))
            return {depth: total[depth] + judge(run[0], t) for depth, run in runs.items()}, None

        runs, _ = jax.lax.scan(update, runs, jnp.arange(self.steps))
        zeros = {depth: jnp.zeros(len(self.temperatures)) for depth in self.depths}
        total, _ = jax.lax.scan(test, zeros, self.steps + jnp.arange(self.test_batches))
        return jax.tree.map(lambda sum: sum / self.test_batches, total)

    def _rate(self, depth: int) -> optax.Schedule:
        peak = self.faster * self.regime.rate
        if not self.regime.decay:
            return optax.constant_schedule(peak)
        peak, turn = peak * depth**-0.5, round(0.8 * self.steps)
        fall = optax.linear_schedule(peak, 0.1 * peak, max(self.steps - turn, 1))
        return optax.join_schedules([optax.constant_schedule(peak), fall], [turn])
