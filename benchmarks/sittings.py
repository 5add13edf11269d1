"""Results of one benchmark on several CPUs; those of each CPU were measured in one sitting."""

import json
import os
from pathlib import Path

from nagjax.processes import cores


def machine() -> dict:
    """The CPU's cores, and its load before the benchmark: the number of processes that wanted a core, 0 on an idle
    machine."""
    return {"cores": cores(), "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None}


def kept(path: Path, sitting: dict) -> list[dict]:
    """Writes a sitting into a file of results, where it replaces an earlier one on the same CPU. Returns all sittings,
    this one last."""
    known = json.loads(path.read_text()) if path.exists() else []
    sittings = [*(one for one in known if one["cpu"] != sitting["cpu"]), sitting]
    path.write_text(json.dumps(sittings, indent=2) + "\n")
    return sittings
