"""nagjax plan: does a run fit a machine nobody has rented yet, and what will it cost."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from nagjax.commands.options import parse_run
from nagjax.errors import UserError


def plan(args: Sequence[str]) -> None:
    from nagjax.plan.compile import plan as make_plan
    from nagjax.plan.order import filled
    from nagjax.plan.report import ranking, report, sort
    from nagjax.plan.search import search
    from nagjax.plan.topology import parse, require, summary

    description = (
        "Compile a run's training step for a TPU slice or GPU box that is not there: memory, FLOPs, bytes and "
        "collectives, a lower bound of the step time and what it costs; and what to change when it does not fit.\n\n"
        f"--topology NAME is one of {summary()}. Options are those of `nagjax train`; without --mesh.* everything is "
        "sharded over all chips (fsdp), without --batch every chip gets about 8192 tokens."
    )
    extra = [
        ("topology", str | None, None),
        ("vocab", int, 32768),
        ("dollars_per_hour", float | None, None),
        ("search", bool, False),
        ("tries", int, 12),
        ("minutes", float, 15.0),
        ("json", Path | None, None),
    ]
    config, given = parse_run(args, "plan", description, extra)
    if given.topology is None:
        raise UserError("topology", None, f"give --topology; known: {summary()}")
    if given.dollars_per_hour is not None and not given.dollars_per_hour > 0:
        raise UserError("dollars_per_hour", given.dollars_per_hour, "give the price of one chip, above 0")
    for name in ("tries", "minutes"):
        if not getattr(given, name) > 0:
            raise UserError(name, getattr(given, name), "give a number above 0")
    topology = parse(given.topology)
    require(topology.chip)
    config = filled(config, topology, given.vocab, _given(args, "--batch"), _given(args, "--mesh."))

    def one(config) -> dict:
        print(f"compiling for {topology.name}; this takes a minute or more", flush=True)
        return make_plan(config, topology, seconds=60 * given.minutes, dollars_per_hour=given.dollars_per_hour)

    if given.search:
        results = sort(search(config, topology, one, given.tries))
        if not results:
            raise UserError(
                "batch", config.train.batch, f"is divisible by no mesh of {topology.size} chips: try {topology.size}"
            )
        print(ranking(results))
    else:
        results = [one(config)]
    if results[0]["fits"] or not given.search:
        print(report(results[0]))
    if given.json:
        _write(given.json, results if given.search else results[0])


def _given(args: Sequence[str], option: str) -> bool:
    return any(arg.startswith(option) if option.endswith(".") else arg.split("=")[0] == option for arg in args)


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)
