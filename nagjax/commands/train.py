"""Train one model, or continue its training."""

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
    """Train a Transformer with one residual scheme, or continue its training: without --fresh the same command resumes.

    A run's options may also be in a file, nagjax train run.yaml [OPTIONS]; nagjax config prints such a file. --out,
    --fresh, --resume, --force and --hosts.* belong to the command line only.

    Args:
        out: the run's folder; by default runs/SCHEME-dDEPTH-wWIDTH, or runs/NAME with a file NAME.yaml; required with
            --start.
        fresh: start over; what the run in the folder has written is deleted.
        resume: previous: if the newest checkpoint is damaged, use the newest intact one.
        force: start even if the model does not fit into the available memory.
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
