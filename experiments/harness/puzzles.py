"""Generated questions that need any chosen number of sequential steps and have exact answers."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from nagjax.errors import UserError
from nagjax.runs.config import RunConfig, to_dict
from nagjax.train.distributed.mesh import check_rows, make_mesh
from nagjax.train.evaluator import put
from nagjax.train.logging.console import ProgressLine
from nagjax.train.state import Blueprint
from nagjax.train.step import jit_train_step

SYMMETRIES = np.array(list(itertools.permutations(range(5))))  # of S5, in lexicographic order: 0 is the identity
GENERATORS = ((1, 0, 2, 3, 4), (1, 2, 3, 4, 0))  # a transposition and a 5-cycle generate S5


@dataclasses.dataclass(frozen=True)
class Pointers:
    """A permutation f of `nodes` that is a single cycle, given as f(0), f(1), ..., followed by a node s and by hop
    tokens. The answers at s and at the hops are f(s), f(f(s)), ... The cycle is at least twice as long as the number of
    hops, so that going round it backwards is not shorter."""

    name: ClassVar[str] = "pointers"
    nodes: int = 16
    hops: int = 8

    def __post_init__(self):
        if self.nodes < 2 * self.hops:
            raise UserError("nodes", self.nodes, f"{self.hops} hops need at least {2 * self.hops} nodes")

    @property
    def vocab(self) -> int:
        return self.nodes + 1

    @property
    def context(self) -> int:
        return self.nodes + self.hops

    def rows(self, noise: np.random.Generator, count: int) -> tuple[Int[np.ndarray, "N T"], Int[np.ndarray, "N T"]]:
        """Tokens and answers, both int32 [N, T]; -1 where there is nothing to answer."""
        cycles = noise.permuted(np.tile(np.arange(self.nodes), (count, 1)), axis=1)
        rows = np.arange(count)[:, None]
        follows = np.empty_like(cycles)
        follows[rows, cycles] = np.roll(cycles, -1, axis=1)
        tokens = np.full((count, self.context), self.nodes)
        answers = np.full((count, self.context), -1)
        tokens[:, : self.nodes], tokens[:, self.nodes] = follows, cycles[:, 0]
        answers[:, self.nodes :] = cycles[:, 1 : self.hops + 1]
        return tokens, answers


@dataclasses.dataclass(frozen=True)
class Words:
    """A word over two generators of the symmetric group S5; the answer at every letter is the product of the letters so
    far."""

    name: ClassVar[str] = "S5 words"
    hops: int = 24  # letters

    vocab: ClassVar[int] = len(SYMMETRIES)

    @property
    def context(self) -> int:
        return self.hops

    def rows(self, noise: np.random.Generator, count: int) -> tuple[Int[np.ndarray, "N T"], Int[np.ndarray, "N T"]]:
        known = {tuple(own): i for i, own in enumerate(SYMMETRIES.tolist())}
        letters = np.array([known[own] for own in GENERATORS])
        table = np.array([[known[tuple(SYMMETRIES[a][g])] for g in map(list, GENERATORS)] for a in range(self.vocab)])
        drawn = noise.integers(0, len(letters), (count, self.hops))
        answers, product = np.empty((count, self.hops), np.int64), np.zeros(count, np.int64)
        for at in range(self.hops):
            product = table[product, drawn[:, at]]
            answers[:, at] = product
        return letters[drawn], answers


Puzzle = Pointers | Words


@dataclasses.dataclass(frozen=True)
class Solve:
    """A job: training on a puzzle, with fresh questions at every step; only answers count in the loss."""

    name: str
    labels: dict[str, Any]
    how: RunConfig
    puzzle: Puzzle
    test_batches: int = 8

    def config(self) -> dict[str, Any]:
        puzzle = {"name": self.puzzle.name} | dataclasses.asdict(self.puzzle)
        return to_dict(self.how) | {"puzzle": puzzle, "test_batches": self.test_batches}

    def batch(self, number: int) -> dict[str, np.ndarray]:
        """Batch `number` of the seed's questions; numbers from the number of steps on are for testing."""
        options = self.how.train
        tokens, answers = self.puzzle.rows(np.random.default_rng((options.seed, number)), options.batch)
        shape = tokens.shape
        return {
            "tokens": tokens.astype(np.int32),
            "targets": np.maximum(answers, 0).astype(np.int32),
            "segment_ids": np.ones(shape, np.int32),
            "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy(),
            "weights": (answers >= 0).astype(np.float32),
        }

    def run(self, folder: Path) -> dict[str, Any]:
        """The loss in nats per answer, and the share of right answers by number of hops."""
        config, mesh = self.how, make_mesh(self.how.mesh)
        options = config.train
        check_rows(options.batch, options.accumulate, mesh.shape)
        blueprint = Blueprint.of(config, mesh)
        state, step = blueprint.create(), jit_train_step(blueprint)
        line = ProgressLine(self.name, options.steps, options.batch * config.model.context)
        pending, curve = None, []
        for done in range(1, options.steps + 1):
            state, metrics = step(state, put(blueprint, self.batch(done - 1)))
            if pending is not None:
                curve.append(float(pending.loss))
                line.update(done - 1, curve[-1])
            pending = metrics
        curve.append(float(pending.loss))

        @jax.jit
        def answer(params, batch):
            model = blueprint.model(params)
            logits = model.logits(model(batch.tokens, batch.where))
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], axis=-1)[..., 0]
            right = (jnp.argmax(logits, axis=-1) == batch.targets) * batch.weights
            return jnp.sum(right, axis=0), jnp.sum(chosen * batch.weights), jnp.sum(batch.weights, axis=0)

        tests = range(options.steps, options.steps + self.test_batches)
        found = [answer(state.params, put(blueprint, self.batch(number))) for number in tests]
        right, nats, count = (np.sum([np.asarray(own[i]) for own in found], axis=0) for i in range(3))
        asked = count > 0
        (folder / "loss.json").write_text(json.dumps(curve))
        return {
            "loss": float(-nats / count.sum()),
            "steps": options.steps,
            "accuracy": (right[asked] / count[asked]).tolist(),
        }
