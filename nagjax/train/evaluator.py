"""Evaluation of a model on validation text, and the transfer of batches to the devices."""

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

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

ROUNDING = 1e-6  # of a mean of shares in float32: a mean this near to 1 counts as 1


class PartBatch(Batch):
    """A batch of a mixture, whose rows all come from the corpus with this index."""

    corpus: int = 0  # an attribute, not a field of the tuple: one compiled program serves all corpora


def corpus_of(batch: Batch) -> int:
    """The index of the mixture's corpus that the batch comes from; 0 if there is no mixture."""
    return batch.corpus if isinstance(batch, PartBatch) else 0


class Evaluator:
    """Scores a model on validation text: the run's own, unless `dataset` is given.

    Every batch of a mixture comes from one corpus. Each corpus is scored alone; the total weights it by its share of
    the training rows, however much validation text it has.

    With `causal`, Mixture-of-Depths chooses tokens by the run's causal decider instead of by top-k.

    Raises UserError if the devices do not divide the run's batches.
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
        """Yields the first `limit` (None: all) batches of one fixed order, on the devices; of a mixture at least one
        batch of each corpus."""
        size, context = self.blueprint.config.train.batch, self.blueprint.config.model.context
        share = batch_share(self.blueprint.mesh)
        found = batches(self.dataset, batch=size, context=context, repeat=False, **share)
        limit = None if limit is None else max(limit, len(self.names))
        made = (put(self.blueprint, batch) for batch in itertools.islice(found, limit))
        if not isinstance(self.dataset, Mixture):
            return made
        turns = self.dataset.turns(size, context)
        return (_of_part(batch, corpus) for batch, (corpus, _) in zip(made, turns, strict=False))

    def check(self, batches: Iterable[Batch]) -> None:
        """Raises UserError if no target counts in a corpus's batches, which then have no loss."""
        counts: dict[int, float] = collections.defaultdict(float)
        for batch in batches:
            counts[corpus_of(batch)] += float(jnp.sum(batch.weights))
        self._refuse_empty(counts)

    def _refuse_empty(self, counts: Mapping[int, float]) -> None:
        empty = [corpus for corpus, count in counts.items() if not count]
        if not empty:
            return
        config, data = self.blueprint.config, self.dataset.config
        ways = [] if data.rows == "whole" else ["--data.rows whole"]
        ways += ["a --start with a longer context" if config.start else "a longer --context", "more text"]
        fix = f"no target in these validation batches counts: train with {', '.join(ways[:-1])} or {ways[-1]}"
        field, value = ("data.mix", data.mix[empty[0]]) if data.mix else ("data.path", data.path)
        raise UserError(field, value, fix)

    def __call__(self, params, mod: dict, step: int, batches: Iterable[Batch]) -> tuple[dict, dict]:
        """Evaluates `params` on the batches and returns scores and telemetry.

        Scores: `loss` (nats per token), `bits_per_byte`, `accuracy`, `targets` (how many were scored), and for a
        mixture `loss/NAME` of each corpus. A routed model adds `mod_rate`, the share of (token, sublayer) pairs
        skipped, and the same for one kind of sublayer, `mod_rate_attention` and `mod_rate_mlp`.

        Telemetry: by name a list with one mean per sublayer over all tokens that are not padding; `log_norm` has one
        more value, in front of the first sublayer. A routed model adds `executed`, the share of the tokens that ran,
        and `agreement` of the causal decider with top-k; adaptive depth adds `computed`, the share of the slots that
        were computed.

        Raises UserError if no target counts in a corpus's batches.
        """
        results, corpora = [], []
        for batch in batches:
            corpora.append(corpus_of(batch))
            table = self.token_bytes[corpora[-1]]
            results.append(self.step(params, mod, jnp.int32(step), Batch(*batch), table))
            results[-2:-1] = jax.device_get(results[-2:-1])  # one batch behind: the devices stay busy
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
        """The weight of every batch in a mean over tokens, and the scores. Each corpus counts by its share among the
        corpora that the batches came from."""
        sums = {c: [r for r, other in zip(results, corpora, strict=True) if other == c] for c in sorted({*corpora})}
        tokens, origin = np.array([float(r.tokens) for r in results]), np.array(corpora)
        counts = {corpus: sum(float(r.sums.count) for r in found) for corpus, found in sums.items()}
        self._refuse_empty(counts)
        total, losses, nats, correct, read_bytes = sum(counts.values()), {}, 0.0, 0.0, 0.0
        for (corpus, found), share in zip(sums.items(), among(self.shares, [*sums]), strict=True):
            scale = share * (total / counts[corpus])  # 1 if there is one corpus
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
    """Scores and telemetry of a routed model under top-k, to which those under its causal decider are added with the
    prefix `causal_`; `agreement` of the two rules becomes a score, the mean over the sublayers where some tokens
    skip."""
    (scores, depth), (decided, decided_depth) = top_k, causal
    agreement, executed = np.array(depth["agreement"]), np.array(depth["executed"])
    some = executed < 1.0
    scores = scores | {"agreement": float(np.mean(agreement[some])) if np.any(some) else 1.0}
    scores |= {f"causal_{name}": decided[name] for name in (*JUDGED, *(n for n in decided if n.startswith("loss/")))}
    return scores, depth | {"causal_executed": decided_depth["executed"]}


def put(blueprint: ModelBlueprint, batch: dict) -> Batch:
    """This process's rows of a batch as global arrays. Raises UserError for a token id outside the vocabulary: on the
    devices it would silently read beyond the table."""
    vocab = blueprint.config.model.vocab
    for name in ("tokens", "targets"):
        if not 0 <= (low := int(np.min(batch[name]))) <= (high := int(np.max(batch[name]))) < vocab:
            fix = f"the model has ids up to {vocab - 1}: the corpus is damaged or another tokenizer's, prepare it again"
            raise UserError("token id", high if high >= vocab else low, fix)
    sharding = batch_sharding(blueprint.mesh)
    return Batch(**{k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()})
