"""One scheme for every kind of stream: for tests of what a stream goes through, which are many times a scheme's own."""

import typing

from nagjax.residual.registry import schemes

USUAL = ("plain", "nag")  # come first


def one_per_stream() -> list[str]:
    """Schemes whose `open`, `read` and `skip` no earlier one has; "plain" and "nag" stand for their kinds."""
    known = schemes()
    found = {}
    for name in (*USUAL, *known):
        cls = known[name]
        found.setdefault((cls.open, cls.read, cls.skip), name)
    return list(found.values())


def one_per_layout() -> list[str]:
    """Of these, schemes whose stream is a structure of arrays no earlier one has: what a mesh splits, and what
    gathering tokens goes through."""
    known, found = schemes(), {}
    for name in one_per_stream():
        found.setdefault(str(typing.get_type_hints(known[name].open)["return"]), name)
    return list(found.values())
