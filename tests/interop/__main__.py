"""`python -m tests.interop --docs docs/import.md` measures how far logits are from transformers'."""

import argparse
import functools
import sys
import tempfile
from pathlib import Path

import numpy as np

from nagjax.interop.exporting import export
from nagjax.interop.source import read_source
from nagjax.residual import find_scheme
from tests.interop.conftest import Reference, reference_python
from tests.interop.parity import logits_of
from tests.interop.reference_cases import CASES, SHORTER
from tests.interop.test_export import ADAPTED, PLAIN, TOKENS, run_of

BEGIN, END = "<!-- parity: begin -->", "<!-- parity: end -->"


def furthest(a: np.ndarray, b: np.ndarray) -> str:
    return f"{np.abs(a - b).max():.1e}"


def rows(reference: Reference, scratch: Path) -> list[tuple[str, str, str]]:
    found = []
    for case in CASES:
        run, want = read_source(reference.folder / case, context=SHORTER.get(case)), reference.logits(case)
        found.append(("import", case, furthest(logits_of(run, reference.tokens(case)), want)))
    formats = {"export": (PLAIN, "plain"), "bundle, AutoModel adapter": ({n: (s, {}) for n, s in adapted()}, "bundle")}
    for title, (cases, format) in formats.items():
        for case, (scheme, changes) in cases.items():
            run, out = run_of(scheme(), scratch, **changes), scratch / f"{format}-{case}"
            export(run, out, format=format)
            found.append((title, case, furthest(reference.load(out, TOKENS), logits_of(run, TOKENS))))
    return found


def adapted() -> list:
    return [(name, functools.partial(find_scheme(scheme), **options)) for name, (scheme, options) in ADAPTED.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "reference").mkdir()
        reference = Reference(reference_python(), Path(folder) / "reference")
        PLAIN.update({case: (find_scheme(scheme), changes) for case, (scheme, changes) in PLAIN.items()})
        lines = ["| direction | model | greatest difference |", "|---|---|---|"]
        lines += [f"| {way} | {case} | {difference} |" for way, case, difference in rows(reference, Path(folder))]
        reference.close()
    text = args.docs.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    args.docs.write_text("\n".join([before + BEGIN, *lines, END]) + after, encoding="utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
