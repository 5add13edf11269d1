"""Evaluation of a model on validation text, and how batches reach the devices."""

import itertools
import math
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from nagjax.data import Dataset, Mixture, batches, open_dataset
from nagjax.data.shares import among
from nagjax.errors import UserError
from nagjax.runs.blueprint import ModelBlueprint
from nagjax.train.distributed.mesh import batch_sharding, batch_share, check_devices
from nagjax.train.loss import Batch
from nagjax.train.step import jit_eval_step

ROUNDING = 1e-6  # of a mean of shares in float32: what is as near to 1 is all


class PartBatch(Batch):
    """A batch of one corpus of a mixture: of which."""

    corpus: int = 0  # no field: the same program runs for all of them


def corpus_of(batch: Batch) -> int:
    """Which corpus of a mixture the batch is of; 0 without one."""
    return batch.corpus if isinstance(batch, PartBatch) else 0


class Evaluator:
    """What a model makes of validation text: the run's own, unless `dataset` is given.

    Of a mixture every batch is of one corpus; scores are of each corpus alone, and then summed with its share of the
    training's rows, whatever there is of its validation text.

    With `causal`, Mixture-of-Depths chooses tokens by the run's causal decider instead of by top-k.

    Raises UserError where the devices do not divide the run's batches.
    """

    def __init__(self, blueprint: ModelBlueprint, dataset: Dataset | None = None, *, causal: bool = False):
        check_devices(blueprint.config.train.batch, blueprint.mesh.shape)
        self.blueprint = blueprint
        self.dataset = dataset or open_dataset(blueprint.config.data, split="validation")
        mixture = self.dataset if isinstance(self.dataset, Mixture) else None
        self.names, self.shares = (mixture.names, mixture.shares) if mixture else (("",), (1.0,))
        corpora = mixture.corpora if mixture else (self.dataset,)
        self.token_bytes = [jnp.asarray(corpus.bytes_per_token()) for corpus in corpora]
        self.step = jit_eval_step(blueprint, causal=causal)

    def batches(self, limit: int | None = None) -> Iterator[Batch]:
        """The first `limit` (None: all) batches of one fixed order, on the devices; of a mixture at least one of each
        corpus."""
        size, context = self.blueprint.config.train.batch, self.blueprint.config.model.context
        share = batch_share(self.blueprint.mesh)
        found = batches(self.dataset, batch=size, context=context, repeat=False, **share)
        limit = None if limit is None else max(limit, len(self.names))
        made = (put(self.blueprint, batch) for batch in itertools.islice(found, limit))
        if not isinstance(self.dataset, Mixture):
            return made
        turns = self.dataset.turns(size, context)
        return (_of_part(batch, corpus) for batch, (corpus, _) in zip(made, turns, strict=False))

    def __call__(self, params, mod: dict, step: int, batches: Iterable[Batch]) -> tuple[dict, dict]:
        """`loss` (nats per token), `bits_per_byte`, `accuracy`, `targets`; and telemetry, lists over sublayers
        (`log_norm` also in front of the first), means over all tokens that are no padding. Of a mixture `loss/NAME` of
        each corpus, too.

        Telemetry of a routed model has `executed`, the share of the tokens that ran, and `agreement` of the causal
        decider with top-k, too, and with adaptive depth `computed`, the share of the places that were computed; its
        scores have `mod_rate`, the share of (token, sublayer) pairs skipped, and its parts `mod_rate_attention` and
        `mod_rate_mlp`.
        """
        results, corpora = [], []
        for batch in batches:
            corpora.append(corpus_of(batch))
            table = self.token_bytes[corpora[-1]]
            results.append(self.step(params, mod, jnp.int32(step), Batch(*batch), table))
            results[-2:-1] = jax.device_get(results[-2:-1])  # one behind: neither waits for long, nor runs ahead
        results = jax.device_get(results)
        weights, scores = self._weighed(results, corpora)
        mean = lambda values: np.tensordot(weights, np.stack(values).astype(np.float64), 1)  # noqa: E731
        depth = {name: mean([r.telemetry[name] for r in results]) for name in results[0].telemetry}
        first = depth["log_norm"][:1] - depth["growth"][:1]
        depth["log_norm"] = np.concatenate([first, depth["log_norm"]])
        if results[0].routing is not None:
            for name in sorted({"executed", "agreement", "computed"} & results[0].routing.keys()):
                depth[name] = mean([r.routing[name] for r in results])
            depth["executed"] = np.where(depth["executed"] > 1.0 - ROUNDING, 1.0, depth["executed"])
            skipped = 1.0 - depth["executed"]
            parts = {"": skipped, "_attention": skipped[::2], "_mlp": skipped[1::2]}
            scores |= {f"mod_rate{part}": float(np.mean(rates)) for part, rates in parts.items()}
        return scores, {name: [float(v) for v in values] for name, values in depth.items()}

    def _weighed(self, results: list, corpora: list[int]) -> tuple[np.ndarray, dict]:
        """Every result's weight in a mean over tokens, and the scores: each corpus counts by its share among those that
        were read."""
        sums = {c: [r for r, other in zip(results, corpora, strict=True) if other == c] for c in sorted({*corpora})}
        tokens, origin = np.array([float(r.tokens) for r in results]), np.array(corpora)
        counts = {corpus: sum(float(r.sums.count) for r in found) for corpus, found in sums.items()}
        if empty := [corpus for corpus, count in counts.items() if not count]:
            change = "train with --data.rows whole or a longer --context, or give more text"
            fix = f"no target in these validation batches counts: {change}"
            config = self.dataset.config
            field, value = ("data.mix", config.mix[empty[0]]) if config.mix else ("data.path", config.path)
            raise UserError(field, value, fix)
        total, losses, nats, correct, read_bytes = sum(counts.values()), {}, 0.0, 0.0, 0.0
        for (corpus, found), share in zip(sums.items(), among(self.shares, [*sums]), strict=True):
            scale = share * (total / counts[corpus])  # 1 where there is one corpus
            own = sum(float(r.sums.nats) for r in found)
            losses[f"loss/{self.names[corpus]}"] = own / counts[corpus]
            nats += scale * own
            correct += scale * sum(float(r.sums.correct) for r in found)
            read_bytes += scale * sum(float(r.bytes) for r in found)
            tokens[origin == corpus] *= share / tokens[origin == corpus].sum()
        scores = {
            "loss": nats / total,
            "bits_per_byte": nats / math.log(2) / read_bytes if read_bytes else None,
            "accuracy": correct / total,
            "targets": int(total),
        }
        return tokens, scores | (losses if len(self.names) > 1 else {})


def _of_part(batch: Batch, corpus: int) -> PartBatch:
    made = PartBatch(*batch)
    made.corpus = corpus
    return made


JUDGED = ("loss", "bits_per_byte", "accuracy", "mod_rate", "mod_rate_attention", "mod_rate_mlp")


def with_causal(top_k: tuple[dict, dict], causal: tuple[dict, dict]) -> tuple[dict, dict]:
    """Scores and telemetry of a routed model under top-k, and beside them, by names with `causal_`, under its causal
    decider; `agreement` of the two rules, mean over the sublayers where some tokens skip."""
    (scores, depth), (decided, decided_depth) = top_k, causal
    agreement, executed = np.array(depth["agreement"]), np.array(depth["executed"])
    some = executed < 1.0
    scores = scores | {"agreement": float(np.mean(agreement[some])) if np.any(some) else 1.0}
    scores |= {f"causal_{name}": decided[name] for name in (*JUDGED, *(n for n in decided if n.startswith("loss/")))}
    return scores, depth | {"causal_executed": decided_depth["executed"]}


def put(blueprint: ModelBlueprint, batch: dict) -> Batch:
    """This process' rows of a batch as global arrays. Raises UserError for token ids that the model has not: on the
    devices they would read, in silence, what lies behind the table."""
    vocab = blueprint.config.model.vocab
    for name in ("tokens", "targets"):
        if not 0 <= (low := int(np.min(batch[name]))) <= (high := int(np.max(batch[name]))) < vocab:
            fix = f"the model has ids up to {vocab - 1}: the corpus is damaged or another tokenizer's, prepare it again"
            raise UserError("token id", high if high >= vocab else low, fix)
    sharding = batch_sharding(blueprint.mesh)
    return Batch(**{k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()})
