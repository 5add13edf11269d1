"""Results of one benchmark on several CPUs, each measured in one sitting."""

import json
from pathlib import Path


def beside(path: Path, sitting: dict) -> list[dict]:
    """The sittings in a file of results, the last one last: this one in place of an earlier one on its CPU."""
    known = json.loads(path.read_text()) if path.exists() else []
    return [*(one for one in known if one["cpu"] != sitting["cpu"]), sitting]
