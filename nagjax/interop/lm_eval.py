"""Adapter that runs lm-evaluation-harness on any run: it computes the log-likelihoods and generations that tasks
request."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from nagjax.console import note
from nagjax.data.tokenizer import opening_of, special_ids
from nagjax.errors import UserError
from nagjax.generate.sample import cut, facts_of, generate
from nagjax.runs.opening import OpenRun
from nagjax.train.score import continuation_scores
from nagjax.train.tasks import encode_pairs

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as missing:
    fix = f"needs lm-evaluation-harness ({missing}): pip install -e '.[eval]'"
    raise UserError("tasks", "lm_eval", fix) from None

NEW_TOKENS = 256  # default for generations of tasks that set no number
SAMPLING = {"top_k": int, "top_p": float, "min_p": float}


class NagjaxLM(TemplateLM):
    """A run with the harness's interface: `loglikelihood`, `loglikelihood_rolling` and `generate_until`.

    Requests of similar lengths share a batch of `batch` rows; a Mixture-of-Depths run uses its causal decider.
    """

    def __init__(self, run: OpenRun, batch: int = 8):
        super().__init__()
        self.run, self.batch = run, batch
        self.shortened: dict[int, int] = {}  # number of new tokens that a task asked for: number generated

    @property
    def eot_token_id(self) -> int:
        return self.run.tokenizer.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without a context: the one that the model expects in front, or end-of-text."""
        return opening_of(self.run.tokenizer)

    @property
    def max_length(self) -> int:
        return self.run.config.model.context

    @property
    def tokenizer_name(self) -> str:
        return f"{self.run.tokenizer.name}-{self.run.tokenizer.fingerprint[:16]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        front = [] if add_special_tokens is False else self.run.beginning
        return front + self.run.tokenizer.encode(string).tolist()

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokenizes a pair as training does for its tasks, and as the harness does; but a context of spaces alone, or a
        continuation that merged with its context, still gets at least one token."""
        return encode_pairs(self.run.tokenizer, [(context, continuation)])[0]

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **_) -> list[tuple[float, bool]]:
        """Scores `requests`, each ((context, continuation), context ids, continuation ids)."""
        scores = continuation_scores(self.run, [(own, more) for _, own, more in requests], batch=self.batch)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text in nats: it is read in windows of the model's context, and every token
        is predicted once."""
        windows, owner = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            parts = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            found = [make_disjoint_window(part) for part in parts]
            windows += found
            owner += [i] * len(found)
        sums = [0.0] * len(requests)
        for i, (nats, _) in zip(owner, continuation_scores(self.run, windows, batch=self.batch), strict=True):
            sums[i] += nats
        return sums

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Generates greedily, or by sampling if the task says so, with a seed per batch. Cuts the text at the first
        stop text; a stop text that is a special token ends generation. A prompt that is too long loses its
        beginning."""
        kinds = defaultdict(list)
        for i, request in enumerate(requests):
            options = dict(request.args[1])
            until = options.get("until") or []
            until = [text for text in ([until] if isinstance(until, str) else until) if text]
            tokens = int(options.get("max_gen_toks") or options.get("max_tokens") or NEW_TOKENS)
            tokens = self._fitting(tokens)
            sampled = options.get("do_sample", options.get("temperature", 0.0) > 0.0)
            sampling = {"temperature": float(options.get("temperature", 1.0)) if sampled else 0.0}
            sampling |= {name: kind(options[name]) for name, kind in SAMPLING.items() if options.get(name) is not None}
            ends = tuple(special_ids(self.run.tokenizer, until))
            kinds[tokens, ends, tuple(sampling.items())].append((i, request.args[0], until))
        texts, seeds = [""] * len(requests), itertools.count()
        for (tokens, ends, sampling), asked in kinds.items():
            encoded = [(i, self._prompt(prompt, self.max_length - tokens), until) for i, prompt, until in asked]
            encoded.sort(key=lambda entry: -len(entry[1]))
            for start in range(0, len(encoded), self.batch):
                part = encoded[start : start + self.batch]
                rows = [ids for _, ids, _ in part]
                rows += rows[-1:] * (self.batch - len(rows))
                given = {"tokens": tokens, "ends": ends, "seed": next(seeds), **dict(sampling)}
                new_ids = self._generate(rows, [until for _, _, until in part], given)
                for (i, _, until), new in zip(part, new_ids, strict=False):
                    texts[i] = cut(self.run.tokenizer.decode(new), until)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _prompt(self, text: str, room: int) -> list[int]:
        return (self.tok_encode(text) or [self.prefix_token_id])[-room:]

    def _fitting(self, tokens: int) -> int:
        """The number of new tokens of a generation: as many as asked for, but at most half of the context."""
        most = max(1, self.max_length // 2)
        if tokens > most and tokens not in self.shortened:
            note(f"a task asks for {tokens} new tokens: {most} are written, half of the context of {self.max_length}")
            self.shortened[tokens] = most
        return min(tokens, most)

    def _generate(self, rows: list[list[int]], until: list[list[str]], given: dict) -> list[list[int]]:
        run = self.run

        def finished(row: int, new: list[int]) -> bool:
            text = run.tokenizer.decode(new)
            return row >= len(until) or cut(text, until[row]) != text

        return generate(run.model, rows, finished=finished, **given | facts_of(run, given["ends"]))


def _manager(tasks: Sequence[str], folder: str | Path | None) -> TaskManager:
    """A manager of the tasks in `folder` alone if it has all `tasks`, because listing the harness's thousands of tasks
    takes a while."""
    if folder is not None:
        own = TaskManager(include_path=str(folder), include_defaults=False)
        if set(tasks) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=None if folder is None else str(folder))
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        where = "" if folder is None else f" in {folder} nor"
        fix = f"is not{where} among the {len(manager.all_tasks)} tasks of the harness"
        raise UserError("tasks", unknown[0], f"{fix}: of one of your own give the name, and its folder (--task-folder)")
    return manager


def evaluate_tasks(
    run: OpenRun,
    tasks: Sequence[str],
    *,
    task_folder: str | Path | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    batch: int = 8,
) -> dict[str, dict]:
    """The harness's report: `results` (metrics by task, under the harness's names), `versions`, `n-shot`, `n-samples`
    and `higher_is_better`. Also `shortened`: if a task asked for more new tokens than half of the context, the number
    asked for and the number generated.

    task_folder: a folder with tasks of one's own, besides those of the harness. fewshot: examples in each prompt; None:
    the task's own number. limit: the number of questions of each task; None: all. batch: rows of a batch.

    Raises UserError for an unknown task.
    """
    manager = _manager(tasks, task_folder)
    model = NagjaxLM(run, batch)
    results = simple_evaluate(
        model,
        tasks=list(tasks),
        num_fewshot=fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=0,
    )
    names = ("results", "versions", "n-shot", "n-samples", "higher_is_better")
    return {name: results[name] for name in names} | {"shortened": model.shortened}
