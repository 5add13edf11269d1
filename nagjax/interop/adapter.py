"""Facts about the bundle's AutoModel adapter that can be had without PyTorch: its path, and the schemes it supports."""

import ast
from functools import cache
from pathlib import Path

ADAPTER = Path(__file__).with_name("modeling_nagjax.py")  # PyTorch and transformers run it without nagjax


@cache
def adapted_schemes() -> tuple[str, ...]:
    """The keys of the adapter's `SCHEMES`, read from its source."""
    for node in ast.parse(ADAPTER.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SCHEMES":
            return tuple(ast.literal_eval(key) for key in node.value.keys)
    raise AssertionError(f"no SCHEMES in {ADAPTER}")
