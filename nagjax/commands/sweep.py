"""Train one config many times, over a grid of options or random draws of them."""

import json
from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL
from nagjax.config_file import SUFFIXES, is_config_file, read_config_file
from nagjax.console import say
from nagjax.errors import UserError
from nagjax.memory import keep_freed_memory
from nagjax.ranges import Count, Natural, Seed


def main(
    config: Annotated[Path, POSITIONAL],
    out: Path,
    vary: tuple[str, ...] = (),
    draws: Natural = 0,
    draw_seed: Seed = 0,
    processes: Count = 1,
    shard: str = "0/1",
) -> None:
    """Train one config many times, over a grid of options or random draws of them, and report which run is best. The
    same command continues the runs that are not finished; several processes may work on one sweep at once.

    Args:
        config: a file of options (.yaml), as nagjax config prints it.
        out: folder for the runs' folders and for sweep.json.
        vary: options to vary, with their names in the file and their values: lr=0.001,0.002 scheme=plain,nag; or, with
            --draws, a range from which values are drawn log-uniformly: lr=1e-4..1e-2.
        draws: number of different random combinations, or all if there are fewer; 0: the whole grid.
        draw_seed: random seed of the draws.
        processes: number of runs at the same time on this machine, which share its cores. Accelerators are not shared:
            start one process for each, with its own --shard and CUDA_VISIBLE_DEVICES.
        shard: i/n: train only every n-th run, beginning with run i (counted from 0), for the tasks of a job array.
    """
    if not is_config_file(str(config)):
        fix = f"a file of options ends in {' or '.join(SUFFIXES)}: nagjax config prints one to begin with"
        raise UserError("config", str(config), fix)
    from nagjax.files import check_writable, write_text
    from nagjax.processes import in_processes
    from nagjax.sweep import check_all, of_others, on_one_text, plan, results, table, taken, work

    given = {"base": read_config_file(config), "vary": vary, "draws": draws, "seed": draw_seed}
    trials = plan(**given)
    mine = trials[taken(shard)]
    check_writable(out)
    say(f"{len(mine)} of {len(trials)} runs, in {out}" if len(mine) < len(trials) else f"{len(trials)} runs, in {out}")
    keep_freed_memory()
    check_all(mine, out)  # here, so that what is refused is told once, and before any is trained
    if processes == 1:
        work(mine, out, say)
    else:
        told = {"plan": given, "shard": shard, "out": str(out)}
        in_processes("nagjax.sweep", told, min(processes, len(mine)))
    gone = of_others(trials, out)  # by the list that is written anew
    known, found = None, results(trials, out)
    while known != (ended := {own["name"] for own in found if own["finished"]}):
        known = ended  # other processes write the file, too, and the last has to know all that are finished
        write_text(out / "sweep.json", json.dumps(found, indent=1))
        found = results(trials, out)
    if gone:
        say(f"runs of another sweep in {out}, no longer in its sweep.json: {', '.join(gone)}")
    if left := len(trials) - sum(own["finished"] for own in found):
        say(f"{left} of {len(trials)} runs are not finished: the same command goes on with them, and lists all")
    print(table(found))
    if not on_one_text(found, out):
        say("the runs were scored on validation texts of their own: their order does not say which is better")
