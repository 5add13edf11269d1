"""Results of one benchmark on several CPUs, each measured in one sitting."""

import json
import os
from pathlib import Path

from nagjax.processes import cores


def machine() -> dict:
    """Cores, and what else they had to do before: processes that wanted one, 0 on an idle machine."""
    return {"cores": cores(), "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None}


def kept(path: Path, sitting: dict) -> list[dict]:
    """Writes a sitting into a file of results, in place of an earlier one on its CPU. Returns all, this one last."""
    known = json.loads(path.read_text()) if path.exists() else []
    sittings = [*(one for one in known if one["cpu"] != sitting["cpu"]), sitting]
    path.write_text(json.dumps(sittings, indent=2) + "\n")
    return sittings
