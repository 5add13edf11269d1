"""Train one model, or go on training it."""

import shlex
from pathlib import Path
from typing import Literal

from nagjax.console import say
from nagjax.memory import keep_freed_memory
from nagjax.options import RunOptions
from nagjax.train.distributed.hosts_config import HostsConfig


def main(
    options: RunOptions,
    hosts: HostsConfig,
    out: Path | None = None,
    fresh: bool = False,
    resume: Literal["latest", "previous"] = "latest",
    force: bool = False,
) -> None:
    """Train a Transformer under one residual scheme, or go on training it: without --fresh the same command resumes.

    A run's options may stand in a file as well, nagjax train run.yaml [OPTIONS]; nagjax config prints one. --out,
    --fresh, --resume, --force and --hosts.* are the command's own.

    Args:
        out: the run's folder; by default runs/SCHEME-dDEPTH-wWIDTH, or runs/NAME of a file NAME.yaml; with --start it
            has to be given.
        fresh: start over; what the run in the folder has written is deleted.
        resume: previous passes over a damaged newest checkpoint.
        force: begin also where the model does not fit into the memory there is.
    """
    folder = out or options.folder
    say(f"{options}, in {folder}")
    keep_freed_memory()

    import jax

    from nagjax.train.distributed.hosts import connect
    from nagjax.train.loop import train

    config = options.config()
    connect(hosts)
    train(config, folder, fresh=fresh, skip_damaged=resume == "previous", force=force)
    if jax.process_index() == 0:
        name = shlex.quote(str(folder))
        say(f"finished: {folder}\n  nagjax eval {name}\n  nagjax generate {name} --prompt 'def '")
