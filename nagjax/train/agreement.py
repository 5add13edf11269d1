"""Checks that all hosts of a run were started with the same settings and read the same text."""

import json
from pathlib import Path

import jax

from nagjax.data import Dataset
from nagjax.errors import UserError
from nagjax.json_reader import parse_json
from nagjax.runs.config import RunConfig, differences, flatten, to_dict
from nagjax.runs.identity import START, WHERE_FROM, corpus_identity, read_id
from nagjax.train.distributed.consensus import from_first, together

# Options that may differ between hosts, because they only say where things lie. The text, the run to start from and the
# tasks are compared by their content.
OF_THE_HOST = {"data.path", "data.mix", "data.tokenizer", "data.workers"}


def check_alike(config: RunConfig, corpus: Dataset) -> None:
    """Raises UserError on all hosts if any host's settings or text differ from those of host 0."""
    if jax.process_count() == 1:
        return
    mine = together(lambda: _described(config, corpus))
    first = from_first(lambda: mine)
    together(lambda: _compare(first, mine))


def _described(config: RunConfig, corpus: Dataset) -> dict:
    """The settings and the identity of the text that hosts compare: JSON values by dotted name."""
    settings = {name: value for name, value in flatten(to_dict(config)).items() if name not in OF_THE_HOST}
    settings |= {"train.tasks": len(config.train.tasks), START: read_id(Path(config.start)) if config.start else None}
    text = {f"corpus.{name}": value for name, value in corpus_identity(corpus).items() if name != WHERE_FROM}
    return parse_json(json.dumps(settings | text), lenient=True)


def _compare(first: dict, mine: dict) -> None:
    for name, (theirs, own) in differences(first, mine).items():
        fix = f"on host {jax.process_index()}, {theirs!r} on host 0: start every host with the same options and text"
        raise UserError(name, own, fix)
