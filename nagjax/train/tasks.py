"""Tasks that score a run during training and in `nagjax eval`: questions whose answers compete by likelihood.

A task is a file of JSON lines, one question each,

    {"context": "The sky is", "choices": [" blue", " made of tin"], "answer": 0}

or a task of lm-evaluation-harness (`nagjax.train.harness_tasks`). All tasks are read and tokenized before the first
step, and scoring does not change the run.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np

from nagjax.data import Tokenizer
from nagjax.data.tokenizer import beginning_of
from nagjax.errors import UserError
from nagjax.json_reader import LONGEST_LINE, build, parse_json
from nagjax.ranges import Natural
from nagjax.runs.opening import OpenRun
from nagjax.train.score import continuation_scores

FILE = ".jsonl"
FORM = '{"context": "The sky is", "choices": [" blue", " green"], "answer": 0}'

Pair = tuple[list[int], list[int]]
Score = tuple[float, bool]  # log-probability of a continuation in nats, and whether greedy decoding would produce it


class Task(Protocol):
    """The texts to be scored, as pairs (context, continuation), and the metrics that follow from their scores."""

    name: str
    texts: list[tuple[str, str]]

    def metrics(self, scores: Sequence[Score]) -> dict[str, float]: ...


@dataclasses.dataclass(frozen=True)
class Question:
    """One line of a task's file. Each choice is appended to the context as it stands; `answer` is the right one."""

    context: str
    choices: tuple[str, ...]
    answer: Natural  # index among the choices, from 0

    def __post_init__(self):
        if len(self.choices) < 2 or not all(choice.strip() for choice in self.choices):
            raise UserError("choices", list(self.choices), "must be two or more texts, none of them blank")
        if self.answer >= len(self.choices):
            raise UserError("answer", self.answer, f"must be from 0 to {len(self.choices) - 1}")


class Questions:
    """The task in a file. Its metrics: `acc`, the share of questions whose likeliest choice is the right one;
    `acc_norm`, the same with log-probability per character of a choice; and `bits_per_byte` of the right choices,
    including the spaces at the ends of their contexts."""

    def __init__(self, path: Path, limit: int | None = None):
        self.name, self.questions = path.stem, read_questions(path, limit)
        self.texts = [(question.context, choice) for question in self.questions for choice in question.choices]

    def metrics(self, scores: Sequence[Score]) -> dict[str, float]:
        right, by_length, nats, size, waiting = 0, 0, 0.0, 0, iter(scores)
        for question in self.questions:
            found = [next(waiting)[0] for _ in question.choices]
            lengths = [len(choice.strip()) for choice in question.choices]
            right += int(np.argmax(found)) == question.answer
            by_length += int(np.argmax(np.divide(found, lengths))) == question.answer
            nats -= found[question.answer]
            spaces = question.context[len(question.context.rstrip()) :]  # part of the choice: see `encode_pairs`
            size += len((spaces + question.choices[question.answer]).encode())
        count = len(self.questions)
        return {"acc": right / count, "acc_norm": by_length / count, "bits_per_byte": nats / math.log(2) / size}


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The first `limit` (None: all) questions of a file. Raises UserError naming file and line."""
    questions: list[Question] = []
    if path.exists() and not path.is_file():  # reading from a pipe could wait forever
        raise UserError("tasks", str(path), "is not a file: give a file of questions")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                if len(questions) == limit:
                    break
                if line.strip():
                    questions.append(_question(line, f"{path}:{number}"))
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise UserError("tasks", str(path), f"cannot be read ({what}): give a file of questions") from None
    if not questions:
        raise UserError("tasks", str(path), f"has no question: give one a line, {FORM}")
    return questions


def _question(line: bytes, where: str) -> Question:
    try:
        if len(line) > LONGEST_LINE:
            raise ValueError(f"more than {LONGEST_LINE:,} bytes")
        return build(Question, parse_json(line), others=(Question,))
    except (ValueError, UserError) as error:
        raise UserError("tasks", where, f"is not a question ({error}): write {FORM}") from None


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Tasks whose texts have been tokenized."""

    tasks: tuple[Task, ...]
    pairs: tuple[Pair, ...]  # of all tasks, one after the other

    def score(self, run: OpenRun, *, watch: Callable[[Iterable[int]], Iterable[int]] = iter) -> dict[str, float]:
        """The metrics of all tasks, by `TASK/METRIC`. Batches have as many rows as the run processes at once (see
        `continuation_scores`)."""
        train = run.config.train
        scores = continuation_scores(run, self.pairs, batch=train.batch // train.accumulate, watch=watch)
        found, first = {}, 0
        for task in self.tasks:
            own = task.metrics(scores[first : first + len(task.texts)])
            found |= {f"{task.name}/{metric}": float(value) for metric, value in own.items()}
            first += len(task.texts)
        return found

    @property
    def digest(self) -> str:
        """A hash of all questions."""
        return sha256(json.dumps(self.pairs).encode()).hexdigest()

    def check(self, digest: str) -> None:
        """Raises UserError if another host asks other questions: the hosts would wait for each other forever."""
        if self.digest != digest:
            names = ", ".join(task.name for task in self.tasks)
            raise UserError("tasks", names, "differs between hosts: give files that all of them share")

    def __bool__(self) -> bool:
        return bool(self.tasks)


def task_names(given: Sequence[str]) -> list[str]:
    """Splits each entry at its commas into names, except where the entry is the name of a file."""
    parts = [[str(name)] if os.path.isfile(name) else str(name).split(",") for name in given]
    return [name.strip() for part in parts for name in part if name.strip()]


def open_tasks(names: Sequence[str], tokenizer: Tokenizer, context: int, limit: int | None = None) -> Tasks:
    """The tasks with these names (see `task_names`), each `FILE.jsonl` or a name in the harness, for models with this
    context.

    Raises UserError if a file is missing, a line is not a question, a task is unknown, two tasks have the same name,
    the harness is missing, a task asks for more than likelihoods, a choice is longer than the context, or the tokenizer
    cannot encode.
    """
    tasks: list[Task] = []
    for name in (names := task_names(names)):
        if name.endswith(FILE):
            tasks.append(Questions(Path(name), limit))
        else:
            from nagjax.train.harness_tasks import harness_tasks

            tasks += harness_tasks(name, limit)
    known = [task.name for task in tasks]
    if twice := [name for name in known if known.count(name) > 1]:
        raise UserError("tasks", twice[0], "is the name of two tasks: rename a file, or leave one out")
    pairs = encode_pairs(tokenizer, [text for task in tasks for text in task.texts])
    longest = max((len(continuation) for _, continuation in pairs), default=0)
    if longest > context:
        fix = (
            f"a choice has {longest} tokens, the model's context is {context}: leave it out, or use a longer --context"
        )
        raise UserError("tasks", ", ".join(names), fix)
    return Tasks(tuple(tasks), tuple(pairs))


def encode_pairs(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]]) -> list[Pair]:
    """Tokenizes pairs (context, continuation). Both are encoded together, and the first tokens, as many as the context
    alone has, count as the context. Spaces at the context's end count as part of the continuation. An empty context is
    the beginning of a document."""
    if not texts:
        return []
    front = beginning_of(tokenizer)
    contexts = [context.rstrip() for context, _ in texts]
    wholes = tokenizer.encode_batch(["".join(text) for text in texts])
    known = dict.fromkeys(contexts)
    known = dict(zip(known, tokenizer.encode_batch(list(known)), strict=True))
    pairs = []
    for context, whole in zip(contexts, wholes, strict=True):
        before = known[context].tolist()
        after = whole[len(before) :].tolist() or whole[-1:].tolist()  # or the token it merged into
        pairs.append(([*front, *before] or [tokenizer.end_of_text], after))
    return pairs
