"""Find out whether a run fits a TPU slice or GPU machine, and what it would cost, without having one."""

import dataclasses
from pathlib import Path
from typing import Annotated

from nagjax.arguments import Given
from nagjax.console import say
from nagjax.errors import UserError
from nagjax.files import check_writable_file, json_text, write_text
from nagjax.options import RunOptions
from nagjax.plan.bill import ASSUMED_MFU, bill
from nagjax.ranges import Count, Positive, Range


def main(
    options: RunOptions,
    given: Given,
    topology: str | None = None,
    vocab: Count = 32768,
    tokens: Positive | None = None,
    dollars_per_hour: Positive | None = None,
    mfu: Annotated[float, Range(gt=0, le=1)] = ASSUMED_MFU,
    search: bool = False,
    tries: Count = 12,
    minutes: Positive = 15.0,
    json: Path | None = None,
) -> None:
    """Compile a run's training step for a TPU slice or GPU machine without having one. Shows memory, FLOPs, bytes,
    collectives, a lower bound of the step time and the cost, and what to change if the run does not fit.

    Takes the options of nagjax train; no corpus is read. Without --mesh.* everything is sharded over all chips (fsdp);
    without --batch every chip gets about 8192 tokens in each part of a batch (--accumulate), but at least one sequence.

    Args:
        topology: the machine, such as v5e:4x4, v5e-16 or h200x8.
        vocab: number of tokens in the vocabulary; with --start it is that of the starting run.
        tokens: also report the time of a training on this many tokens, such as 3e9, and its cost if a price is given.
        dollars_per_hour: price of one chip.
        mfu: model FLOPs utilization for a second estimate of time and cost, beside the lower bound.
        search: try meshes, rematerialisation policies and numbers of parts of the batch (--accumulate), and rank the
            plans that fit.
        tries: maximum number of programs that a search compiles.
        minutes: time limit for one compilation.
        json: also write the result to this file.
    """
    from nagjax.plan.topology import parse, require, summary

    if topology is None:
        raise UserError("topology", None, f"give --topology; known: {summary()}")
    if not search:
        given.refuse(("tries",), "is for --search: give that, too, or leave it out")
    else:
        tried = ("remat", "accumulate", *(name for name in given if name.startswith("mesh.")))
        given.refuse(tried, "--search tries these: leave it out, also of a file of options")
    if tokens is None:
        given.refuse(("mfu",), "is for what a training costs: give --tokens, too, or leave it out")
    machine = parse(topology)
    from nagjax.plan.compile import plan
    from nagjax.plan.order import filled, mesh_shape, started
    from nagjax.plan.report import ranking, report, sort
    from nagjax.plan.search import search as search_all

    batch_given, mesh_given = "batch" in given, any(name.startswith("mesh.") for name in given)
    config = options.config()
    if config.start:
        given.refuse(("vocab",), "with --start the vocabulary is that run's: leave it out")
        config = started(config)
        vocab = config.model.vocab
    config = filled(config, machine, vocab, batch_given, mesh_given)
    if not search:
        mesh_shape(config, machine)  # what is wrong with it is told before a compiler is asked for
    require(machine)
    if json:
        check_writable_file(json, "json")
    planned = dataclasses.replace(options, parts={**options.parts, "train": config.train})
    say(f"planning {planned}, on {machine.name}")

    def one(config) -> dict:
        say(f"compiling for {machine.name}; this takes a minute or more, {minutes:g} at most")
        found = plan(config, machine, seconds=60 * minutes, dollars_per_hour=dollars_per_hour)
        return found | ({"bill": bill(found, tokens, mfu)} if tokens and "bound" in found else {})

    if search:
        results = sort(search_all(config, machine, one, tries))
        if not results:
            fix = f"no mesh of {machine.size} chips divides it: try {machine.size}"
            raise UserError("batch", config.train.batch, fix)
        print(ranking(results))
    else:
        results = [one(config)]
    if results[0]["fits"] or not search:
        print(report(results[0]))
    if json:
        write_text(json, json_text(results if search else results[0], indent=1) + "\n")
    if all("error" in own for own in results):
        raise UserError("search", search, f"nothing could be compiled, at first because: {results[0]['error']}")
