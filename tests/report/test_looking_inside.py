"""docs/looking_inside.md tells the diagnoses it links to."""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
look = runpy.run_path(str(ROOT / "models" / "look.py"))


def summary() -> dict:
    return json.loads(look["SUMMARY"].read_text())


def test_the_pages_table_is_that_of_the_summary():
    (text,) = look["texts"](summary()).values()
    assert text in look["PAGE"].read_text()


def test_the_summary_has_every_model_and_no_other():
    models = {card.parent.name for card in (ROOT / "models").glob("*/README.md")} - {"runs"}
    assert set(summary()) == models


def test_modulators_are_counted_in_whole_numbers():
    """Not as a mean over batches, which an earlier version told."""
    counts = {name: dead for name, own in summary().items() if (dead := own["dead_modulators"]) is not None}
    assert set(counts) == {"nag-24", "nag_harmonic-24"}
    for name, dead in counts.items():
        assert dead == int(dead) and f"{dead:.0f} of 48 modulators" in summary()[name]["verdict"]
