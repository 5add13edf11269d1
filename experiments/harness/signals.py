"""What the pairs of a token and a sublayer of a trained NAG model could be chosen by besides angles: the loss's gain.

A sublayer adds `e^s t n` to a token's residual. If it were added m times, the first-order gain of adding it would be
`-dL/dm` at m = 1, L the sum of all targets' losses: the inner product of the loss's gradient with the update, or the
angle's tangent times what the loss gains by it. It looks at the labels, those of later tokens too: an oracle, which no
sampling can ask. Its averages over training text, and functions of the state that are fitted to it there, can be asked.

On average it says little: a sublayer's step size is trained until the sum of its gains is about zero. What leaving an
update out adds to the loss is then of second order, half its square times the loss's curvature, which the square of the
gradient stands for (the empirical Fisher: Molchanov et al. 2019, arXiv:1906.10771): the square of the gain.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from experiments.harness.skipping import CLOSE, Point
from nagjax.measure.interventions import residual
from nagjax.mod.costs import costs
from nagjax.model.transformer import BlockCall, Transformer
from nagjax.residual.sublayer import kept
from nagjax.runs.opening import OpenRun
from nagjax.train.head_loss import head_loss
from nagjax.train.loss import Batch

LEAST = 1e-10  # nats^2, added to a squared gain before its logarithm is taken
RIDGE = 0.1  # relative to the mean square of a direction's features, which is 1
ALONE = ((0.0, 1.0), (1.0, 0.0))  # rates at which a block runs only its attention, or only its MLP
TRIES = 8  # attempts to find a threshold


class Signal(NamedTuple):
    """Scores `turns t + weights r + offsets + known` by sublayer, from tangents t and directions r. `known` is given by
    pair, for each batch that is run."""

    turns: Float[np.ndarray, "L 2"]
    weights: Float[np.ndarray, "L 2 D"]
    offsets: Float[np.ndarray, "L 2"]


class Seen(NamedTuple):
    """For all pairs of a batch: the first-order gain (nats), the tangent, and the direction that the sublayer reads."""

    gains: Float[Array, "L 2 B T"]
    turns: Float[Array, "L 2 B T"]
    directions: Float[Array, "L 2 B T D"]


class Scored(NamedTuple):
    """For a batch: sums over its targets, the share of the tokens that ran each sublayer, and all scores."""

    nats: Float[Array, ""]
    correct: Float[Array, ""]
    count: Float[Array, ""]
    ran: Float[Array, "L 2"]
    scores: Float[Array, "L 2 B T"]


class Signals:
    """A dense NAG run in which the pairs whose score is below one threshold are skipped. All signals share one compiled
    program.

    Keys and values are computed for all tokens in every sublayer that runs for any token.
    """

    def __init__(self, run: OpenRun):
        self.run = run
        graph, self.params = nnx.split(self.run.model)
        self._see = jax.jit(functools.partial(_see, graph, self.run.progress))
        self._score = jax.jit(functools.partial(_score, graph, self.run.progress))

    @property
    def shape(self) -> tuple[int, int]:
        return self.run.config.model.depth, 2

    def see(self, text: Sequence[Batch]) -> list[Seen]:
        """The first-order gains, tangents and directions of the dense model on each batch."""
        return [jax.device_get(self._see(self.params, batch)) for batch in text]

    def nothing(self) -> Signal:
        """The signal that scores every pair zero."""
        return Signal(np.zeros(self.shape), np.zeros((*self.shape, self.run.config.model.width)), np.zeros(self.shape))

    @property
    def gate(self) -> int:
        """The multiply-adds of computing a tangent."""
        return self.run.config.model.width * self.run.config.scheme.directions

    def flops(self, ran: Float[np.ndarray, "L 2"]) -> float:
        """Forward FLOPs per token, by the library's closed form, if these shares of the tokens run each sublayer;
        scores not included."""
        return costs(self.run.config.model, self.run.blueprint.parameters, "random", "threshold", shares=ran).forward

    def saved(self) -> Float[np.ndarray, "L 2"]:
        """The forward FLOPs that a token saves by skipping each sublayer, as a share of all."""
        everyone = np.ones(self.shape)
        half, whole = [np.where(np.arange(2) == kind, 0.5, everyone) for kind in (0, 1)], self.flops(everyone)
        kinds = [(whole - self.flops(own)) / (0.5 * self.shape[0] * whole) for own in half]
        return everyone * kinds

    def worth(self, gains: Float[Array, "L 2 *n"]) -> Float[np.ndarray, "L 2 *n"]:
        """Gains divided by the share of the FLOPs that skipping saves."""
        return np.asarray(gains) / np.expand_dims(self.saved(), tuple(range(2, np.ndim(gains))))

    def mean_square(self, seen: Sequence[Seen]) -> Float[np.ndarray, "L 2"]:
        """The mean square of the gains by sublayer, nats^2."""
        return _mean([s.gains**2 for s in seen])

    def counts(self, rate: float) -> range:
        """Numbers of whole sublayers, from one to as many as make up the rate."""
        return range(1, max(round(rate * math.prod(self.shape)), 1) + 1)

    def least(self, seen: Sequence[Seen], count: int) -> Float[np.ndarray, "L 2"]:
        """1 for the `count` sublayers with the least mean squared gain per FLOP, else 0."""
        ranks = np.argsort(np.argsort(self.worth(self.mean_square(seen)), axis=None)).reshape(self.shape)
        return (ranks < count).astype(float)

    def turned(self) -> Signal:
        """The signal that scores by the angle."""
        return self.nothing()._replace(turns=np.ones(self.shape))

    def scaled(self, seen: Sequence[Seen]) -> Signal:
        """The signal that scores by the angle, weighted at each sublayer by the root of mean squared gain per FLOP over
        mean squared tangent."""
        return self.nothing()._replace(
            turns=np.sqrt(self.worth(self.mean_square(seen)) / _mean([s.turns**2 for s in seen]))
        )

    def first_order(self, seen: Sequence[Seen], text: Sequence[Batch]) -> Signal:
        """The signal that predicts the gain per FLOP as a linear function of the direction."""
        return self._fitted(seen, text, [self.worth(s.gains) for s in seen])

    def fitted(self, seen: Sequence[Seen], text: Sequence[Batch]) -> Signal:
        """The signal that predicts the logarithm of the squared gain per FLOP as a linear function of the direction."""
        return self._fitted(seen, text, [np.log(self.worth(s.gains**2 + LEAST)) for s in seen])

    def _fitted(self, seen, text, wanted: Sequence[Float[np.ndarray, "L 2 B T"]]) -> Signal:
        """A signal fitted by ridge regression at each sublayer, on tokens that are not padding."""
        real = np.concatenate([np.asarray(batch.segment_ids).ravel() > 0 for batch in text])
        x, y = (_rows(part)[:, :, real] for part in ([s.directions for s in seen], wanted))
        middle, mean = x.mean(axis=2, keepdims=True), y.mean(axis=2, keepdims=True)
        x, y = x - middle, y - mean
        covariance = np.einsum("lsnd,lsne->lsde", x, x) / x.shape[2] + RIDGE * np.eye(x.shape[-1])
        weights = np.linalg.solve(covariance, np.einsum("lsnd,lsn->lsd", x, y)[..., None] / x.shape[2])[..., 0]
        offsets = mean[..., 0] - np.einsum("lsd,lsd->ls", weights, middle[:, :, 0])
        return self.nothing()._replace(weights=weights, offsets=offsets)

    def correlation(self, signal: Signal, seen: Sequence[Seen]) -> float:
        """The correlation of the signal's scores in the dense model with the logarithms of squared gains; mean over
        sublayers."""
        x, turns, gains = (_rows([getattr(s, name) for s in seen]) for name in ("directions", "turns", "gains"))
        scores = signal.turns[..., None] * turns + np.einsum("lsnd,lsd->lsn", x, signal.weights)
        scores, gains = (part - part.mean(axis=2, keepdims=True) for part in (scores, np.log(gains**2 + LEAST)))
        norms = np.sqrt((scores**2).sum(axis=2) * (gains**2).sum(axis=2))
        return float(np.mean((scores * gains).sum(axis=2) / np.maximum(norms, 1e-30)))

    def score(self, signal: Signal, cut: float, text: Sequence[Batch], known=None) -> list[Scored]:
        known = [np.zeros((*self.shape, *batch.tokens.shape)) for batch in text] if known is None else known
        signal = Signal(*(np.float32(part) for part in signal))
        passes = zip(text, known, strict=True)
        return [jax.device_get(self._score(self.params, signal, np.float32(cut), b, np.float32(k))) for b, k in passes]

    def threshold(self, signal: Signal, rate: float, text: Sequence[Batch], known=None) -> float:
        """The threshold at which this share of the pairs is skipped: a quantile of the dense model's scores, corrected
        by what it misses, because skipping early changes later scores."""
        scores = np.concatenate([s.scores.ravel() for s in self.score(signal, -np.inf, text, known)])
        level = rate
        for _ in range(TRIES):
            cut = float(np.quantile(scores, np.clip(level, 0.0, 1.0)))
            miss = rate - (1.0 - _mean([s.ran for s in self.score(signal, cut, text, known)]).mean())
            if abs(miss) < CLOSE:
                break
            level += miss
        return cut

    def points(
        self, signal: Signal, rates, text, held_out, *, known=None, multiply_adds: float = 0.0
    ) -> list[tuple[Point, Float[np.ndarray, "L 2"]]]:
        """The results of skipping at these rates, and the shares of the tokens that ran. A score costs `multiply_adds`;
        those of a tangent are shared with the update if the token runs.

        `known`: scores for the batches of `text`, followed by those for `held_out`.
        """
        ours, theirs = (known[: len(text)], known[len(text) :]) if known else (None, None)
        cuts = [self.threshold(signal, rate, text, ours) for rate in rates]
        shared = self.gate if signal.turns.any() else 0
        return [self._point(self.score(signal, cut, held_out, theirs), multiply_adds, shared) for cut in cuts]

    def without(self, gone: Float[np.ndarray, "L 2"], held_out) -> tuple[Point, Float[np.ndarray, "L 2"]]:
        """The result if all tokens skip the sublayers that are 1 in `gone`, and no others."""
        return self._point(self.score(self.nothing()._replace(offsets=-gone), -0.5, held_out))

    def others(self, ran: Float[np.ndarray, "L 2"], held_out) -> tuple[Point, Float[np.ndarray, "L 2"]]:
        """The result if each sublayer runs for these shares of the tokens, drawn at random."""
        noise = np.random.default_rng(0)
        known = [noise.random((*self.shape, *batch.tokens.shape)) for batch in held_out]
        return self._point(self.score(self.nothing()._replace(offsets=ran - 1.0), 0.0, held_out, known))

    def _point(
        self, found: Sequence[Scored], multiply_adds: float = 0.0, shared: float = 0.0
    ) -> tuple[Point, Float[np.ndarray, "L 2"]]:
        """`shared`: how many of a score's multiply-adds the update needs as well."""
        ran = np.mean([s.ran for s in found], axis=0)
        nats, correct, count = (sum(float(getattr(s, name)) for s in found) for name in ("nats", "correct", "count"))
        flops = self.flops(ran) + 2 * (ran.size * multiply_adds - float(ran.sum()) * shared)
        return Point(float(1.0 - ran.mean()), flops, nats / count, float(correct / count)), ran


def _rows(parts: Sequence[Float[np.ndarray, "L 2 B T ..."]]) -> Float[np.ndarray, "L 2 N ..."]:
    """The values of all tokens of all batches."""
    return np.concatenate([part.reshape(*part.shape[:2], -1, *part.shape[4:]) for part in parts], axis=2)


def _mean(parts: Sequence[Float[np.ndarray, "L 2 ..."]]) -> Float[np.ndarray, "L 2"]:
    return np.mean([np.asarray(part, np.float64).reshape(*part.shape[:2], -1).mean(axis=-1) for part in parts], axis=0)


def _by_sublayer(model: Transformer, stream, call: BlockCall, advance):
    """The stream after a block whose sublayers `advance(i, at, before, after)` runs, and what `advance` records."""
    notes, layer = [], call.layer
    for i, own in enumerate((layer.block.attention, layer.block.mlp)):
        entry = layer.block.mlp.entry if i == 0 else layer.entry
        at = model.boundary(own.gate, entry, layer.index[i], layer.following[i], call.ctx.progress)
        after = model.sublayers(stream, *call._replace(rates=ALONE[i]))[i].stream
        stream, note = advance(i, at, stream, after)
        notes.append(note)
    return stream, jax.tree.map(lambda *pair: jnp.stack(pair), *notes)


def _see(graph, progress, params, batch: Batch) -> Seen:
    def nats(amounts):
        model = nnx.merge(graph, params)

        def advance(i, at, before, after, call):
            h, added = (residual(model.scheme, s) for s in (before, after))
            added = h + amounts[call.layer.block_index, i][..., None] * (added - h)
            notes = jnp.abs(model.scheme.turn(before, at)), model.scheme.read(before)
            return model.scheme.rebuild(added.astype(model.config.stream_dtype), at, model.ends), notes

        def intervene(model, stream, call):
            return _by_sublayer(model, stream, call, functools.partial(advance, call=call))

        output = model(batch.tokens, batch.where, intervene=intervene, progress=progress)
        return head_loss(model, output, batch)[0], output.seen

    depth = nnx.merge(graph, params).config.depth
    slopes, seen = jax.grad(nats, has_aux=True)(jnp.ones((depth, 2, *batch.tokens.shape)))
    return Seen(-slopes, *seen)


def _score(graph, progress, params, signal: Signal, cut, batch: Batch, known) -> Scored:
    model = nnx.merge(graph, params)

    def intervene(model, stream, call):
        here = jax.tree.map(lambda part: part[call.layer.block_index], (*signal, known))

        def advance(i, at, before, after):
            turns, weights, offsets, pairs = (part[i] for part in here)
            turn, read = jnp.abs(model.scheme.turn(before, at)), model.scheme.read(before)
            scores = turns * turn + read @ weights + offsets + pairs
            ran = scores >= cut
            return jax.tree.map(kept(ran), after, before), (jnp.mean(ran.astype(jnp.float32)), scores)

        return _by_sublayer(model, stream, call, advance)

    output = model(batch.tokens, batch.where, intervene=intervene, progress=progress)
    _, sums = head_loss(model, output, batch)
    return Scored(sums.nats, sums.correct, sums.count, *output.seen)
